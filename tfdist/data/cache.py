"""The data sets of a cache folder: listed, shown, deleted, and forgotten when their time is over."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tfdist.data.folder import WRITING
from tfdist.data.location import default_cache_dir, open_storage
from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.data.storage import Storage
from tfdist.errors import ConfigError, DataError

_DELETING = "deleting"
_DAY_S = 86400.0
_LEFTOVER_S = 7 * _DAY_S
_REMOTE_USE_S = 3600.0  # a use is noted by writing the manifest again where no time can be set; not at every use
_REMOTE_NAME = re.compile(r".+-[0-9a-f]{20}-[0-9a-f]{8}")
_TTL = re.compile(r"\.([^.]+)\.([0-9.e+-]+)d\.ttl")


@dataclass(frozen=True)
class CachedData:
    """A data set that :func:`tfdist.data.from_dataframe` wrote.

    Args:
        path: its folder, a URL where it is not a path.
        manifest: what it holds; None for a folder that was never finished.
        size_bytes: of its data files.
        used_at: when it was last written or taken up again, in seconds since 1970-01-01 UTC.
    """

    path: Path | str
    manifest: Manifest | None
    size_bytes: int
    used_at: float

    @property
    def name(self) -> str:
        """Name of the folder."""
        return str(self.path).rpartition("/")[2]

    @property
    def expires_at(self) -> float | None:
        """When it may be deleted, in seconds since 1970-01-01 UTC; None for never."""
        days = None if self.manifest is None else self.manifest.ttl_days
        return None if days is None else self.used_at + days * _DAY_S


def cached_data(
    cache_dir: str | Path | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> list[CachedData]:
    """The data sets of a cache folder, the last used first, then folders of writers that were cut off.

    Args:
        cache_dir: as in :func:`tfdist.data.from_dataframe`.
        storage_options: likewise.
    """
    cache = _cache(cache_dir, storage_options)
    found = [_read(cache.child(entry.path)) for entry in cache.entries() if entry.is_folder]
    return sorted((data for data in found if data is not None), key=lambda data: (data.manifest is None, -data.used_at))


def delete_data(
    name: str, cache_dir: str | Path | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> CachedData:
    """Delete a data set; a training that reads it fails.

    Args:
        name: of its folder, or the beginning of it where only one begins so.
        cache_dir: as in :func:`tfdist.data.from_dataframe`.
        storage_options: likewise.

    Raises:
        DataError: no data set, or several, have that name.
    """
    chosen = find_data(name, cache_dir, storage_options=storage_options)
    _delete(_cache(cache_dir, storage_options).child(chosen.name))
    return chosen


def find_data(
    name: str, cache_dir: str | Path | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> CachedData:
    """The data set whose folder's name is, or begins with, ``name``.

    Raises:
        DataError: there is none, or there are several.
    """
    known = cached_data(cache_dir, storage_options=storage_options)
    matching = [d for d in known if d.name == name] or [d for d in known if name and d.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise DataError(f"{name!r}: {len(matching)} data sets begin so: {', '.join(d.name for d in matching)}")
    names = ", ".join(d.name for d in known[:10]) or "nothing"
    raise DataError(f"{name!r}: expected a data set of {_cache(cache_dir, storage_options).url}, which holds {names}")


def delete_expired(
    cache_dir: str | Path | None = None, *, storage_options: Mapping[str, Any] | None = None
) -> list[CachedData]:
    """Delete the data sets whose time to live is over, and what writers left behind a week ago or earlier."""
    now = time.time()
    cache = _cache(cache_dir, storage_options)
    expired = [data for data in cached_data(cache_dir, storage_options=storage_options) if _end(data) < now]
    for data in expired:
        _delete(cache.child(data.name))
    return expired


def delete_over(cache: Storage) -> None:
    """As :func:`delete_expired`, for every start of a writer: looks at names and times and opens almost no manifest."""
    now = time.time()
    for entry in cache.entries():
        hint = _TTL.fullmatch(entry.path)
        if hint is not None:
            used = cache.child(hint[1]).stat(MANIFEST)
            if used is not None and used.changed_at + float(hint[2]) * _DAY_S >= now:
                continue
            data = _read(cache.child(hint[1]))
            if data is not None and _end(data) < now:
                _delete(cache.child(data.name))
            cache.remove(entry.path)
        elif entry.path.startswith(".") and entry.path.endswith((f".{WRITING}", f".{_DELETING}")):
            if entry.changed_at + _LEFTOVER_S >= now:
                continue
            folder = cache.child(entry.path if entry.is_folder else entry.path[1:].removesuffix(f".{WRITING}"))
            data = _read(folder)
            if data is not None and data.manifest is None and _end(data) < now:
                _delete(folder)
            if not entry.is_folder:
                cache.remove(entry.path)


def note_use(manifest: Manifest, ttl_days: float | None) -> Manifest:
    """Say that a data set is used now, and for how long it is to live from now on."""
    folder = manifest.storage
    changed = manifest.ttl_days != ttl_days
    manifest = replace(manifest, ttl_days=ttl_days)
    if changed:
        folder.write_text(MANIFEST, manifest.to_json())
        note_ttl(manifest)
    elif folder.is_local:
        os.utime(folder.local / MANIFEST)
    elif (noted := folder.stat(MANIFEST)) is None or noted.changed_at + _REMOTE_USE_S < time.time():
        folder.write_text(MANIFEST, manifest.to_json())
    return manifest


def note_ttl(manifest: Manifest) -> None:
    """Say the time to live of a data set in the name of an empty file beside it, for :func:`delete_over`."""
    folder = manifest.storage
    cache = folder.parent
    for entry in cache.entries():
        if (hint := _TTL.fullmatch(entry.path)) and hint[1] == folder.name:
            cache.remove(entry.path)
    if manifest.ttl_days is not None:
        cache.write_text(f".{folder.name}.{manifest.ttl_days!r}d.ttl", "")


def check_ttl(ttl_days: float | None) -> None:
    """Raise ConfigError where the time to live makes no sense."""
    known = ttl_days is None or (isinstance(ttl_days, int | float) and not isinstance(ttl_days, bool) and ttl_days > 0)
    if not known:
        raise ConfigError(f"ttl_days: expected days above 0, or None to keep the data, got {ttl_days!r}")


def _end(data: CachedData) -> float:
    """When a data set, or what a writer left, may be deleted."""
    if data.manifest is None:
        return data.used_at + _LEFTOVER_S
    return float("inf") if data.expires_at is None else data.expires_at


def _read(folder: Storage) -> CachedData | None:
    try:
        noted = folder.stat(MANIFEST)
        hidden = folder.name.startswith(".")
        if noted is not None and not hidden:
            manifest = Manifest.from_json(folder.read_text(MANIFEST), folder.url, folder.options)
            size = sum(f.size_bytes for f in manifest.fragments)
            return CachedData(folder.location, manifest, size, noted.changed_at)
        ours = hidden and folder.name.endswith((f".{WRITING}", f".{_DELETING}"))
        if not ours and (folder.is_local or not _REMOTE_NAME.fullmatch(folder.name)):
            return None
        files, itself = folder.files(), folder.stat()
        changed = [file.changed_at for file in files] or [itself.changed_at if itself else 0.0]
        return CachedData(folder.location, None, sum(file.size_bytes for file in files), max(changed))
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not ours, or just deleted by another process


def _delete(folder: Storage) -> None:
    if not folder.is_local:
        folder.remove(MANIFEST)  # first: a reader finds a whole data set or none
        folder.remove()
        return
    path = folder.local
    gone = path.with_name(f".{path.name.lstrip('.')}.{uuid.uuid4().hex[:8]}.{_DELETING}")
    with suppress(FileNotFoundError):  # another process was faster
        path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)


def _cache(cache_dir: str | Path | None, storage_options: Mapping[str, Any] | None) -> Storage:
    return open_storage(default_cache_dir() if cache_dir is None else cache_dir, storage_options, "cache_dir")
