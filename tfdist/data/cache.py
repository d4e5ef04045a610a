"""The data sets of a cache folder: listed, shown, deleted, and forgotten when their time is over."""

from __future__ import annotations

import os
import shutil
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from tfdist.data.footers import default_cache_dir
from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.errors import ConfigError, DataError

WRITING = "writing"
_DELETING = "deleting"
_DAY_S = 86400.0


@dataclass(frozen=True)
class CachedData:
    """A data set that :func:`tfdist.data.from_dataframe` wrote.

    Args:
        path: its folder.
        manifest: what it holds; None for a folder that was never finished.
        size_bytes: of its data files.
        used_at: when it was last written or taken up again, in seconds since 1970-01-01 UTC.
    """

    path: Path
    manifest: Manifest | None
    size_bytes: int
    used_at: float

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def expires_at(self) -> float | None:
        """When it may be deleted, in seconds since 1970-01-01 UTC; None for never."""
        days = None if self.manifest is None else self.manifest.ttl_days
        return None if days is None else self.used_at + days * _DAY_S


def cached_data(cache_dir: str | Path | None = None) -> list[CachedData]:
    """The data sets of a cache folder, the last used first, then folders of writers that were cut off.

    Args:
        cache_dir: as in :func:`tfdist.data.from_dataframe`.
    """
    cache = _folder(cache_dir)
    found = [_read(path) for path in sorted(cache.iterdir()) if path.is_dir()] if cache.is_dir() else []
    return sorted((data for data in found if data is not None), key=lambda data: (data.manifest is None, -data.used_at))


def delete_data(name: str, cache_dir: str | Path | None = None) -> CachedData:
    """Delete a data set; a training that reads it fails.

    Args:
        name: of its folder, or the beginning of it where only one begins so.
        cache_dir: as in :func:`tfdist.data.from_dataframe`.

    Raises:
        DataError: no data set, or several, have that name.
    """
    chosen = find_data(name, cache_dir)
    _delete(chosen.path)
    return chosen


def find_data(name: str, cache_dir: str | Path | None = None) -> CachedData:
    """The data set whose folder's name is, or begins with, ``name``.

    Raises:
        DataError: there is none, or there are several.
    """
    known = cached_data(cache_dir)
    matching = [d for d in known if d.name == name] or [d for d in known if name and d.name.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise DataError(f"{name!r}: {len(matching)} data sets begin so: {', '.join(d.name for d in matching)}")
    names = ", ".join(d.name for d in known[:10]) or "nothing"
    raise DataError(f"{name!r}: expected a data set of {_folder(cache_dir)}, which holds {names}")


def delete_expired(cache_dir: str | Path | None = None) -> list[CachedData]:
    """Delete the data sets whose time to live is over, and what writers left behind a week ago or earlier."""
    now = time.time()
    expired = [d for d in cached_data(cache_dir) if (_leftover_until(d) if d.manifest is None else _end(d)) < now]
    for data in expired:
        _delete(data.path)
    return expired


def note_use(path: Path) -> None:
    """Say that a data set is used now."""
    os.utime(path / MANIFEST)


def check_ttl(ttl_days: float | None) -> None:
    """Raise ConfigError where the time to live makes no sense."""
    if ttl_days is not None and (isinstance(ttl_days, bool) or not ttl_days > 0):
        raise ConfigError(f"ttl_days: expected days above 0, or None to keep the data, got {ttl_days!r}")


def _end(data: CachedData) -> float:
    return float("inf") if data.expires_at is None else data.expires_at


def _leftover_until(data: CachedData) -> float:
    return data.used_at + 7 * _DAY_S


def _read(path: Path) -> CachedData | None:
    try:
        if path.name.startswith("."):
            if not path.name.endswith((f".{WRITING}", f".{_DELETING}")):
                return None
            size = sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
            return CachedData(path, None, size, path.stat().st_mtime)
        manifest = Manifest.from_json((path / MANIFEST).read_text(), path)
        size = sum(f.size_bytes for f in manifest.fragments)
        return CachedData(path, manifest, size, (path / MANIFEST).stat().st_mtime)
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not ours, or just deleted by another process


def _delete(path: Path) -> None:
    # Renamed first: a reader finds a whole data set or none.
    gone = path.with_name(f".{path.name.lstrip('.')}.{uuid.uuid4().hex[:8]}.{_DELETING}")
    try:
        path.rename(gone)
    except FileNotFoundError:
        return  # another process was faster
    shutil.rmtree(gone, ignore_errors=True)


def _folder(cache_dir: str | Path | None) -> Path:
    return default_cache_dir() if cache_dir is None else Path(cache_dir).absolute()
