"""A folder: local, or of any file system that fsspec opens."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

from tfdist.errors import DataError, TfdistError

T = TypeVar("T")

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)(?::/|::)")
_CHANGED = ("mtime", "LastModified", "last_modified", "updated", "modified", "created")
_VERSIONS = ("ETag", "etag", "md5Hash", "checksum")


@dataclass(frozen=True)
class Entry:
    """A file or folder.

    Args:
        path: relative to the storage.
        size_bytes: of a file.
        changed_at: seconds since 1970-01-01 UTC, 0 where the file system does not tell.
        version: differs where the content differs, as far as the file system tells.
        is_folder: whether it is one.
    """

    path: str
    size_bytes: int
    changed_at: float
    version: str
    is_folder: bool


@dataclass(frozen=True)
class Storage:
    """A folder of a file system; it need not exist. Small and picklable: each process opens the file system itself.

    Args:
        url: an absolute local path, or a URL.
        options: what fsspec needs to open the URL; they may be secrets, and appear in no text.
    """

    url: str
    options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def is_local(self) -> bool:
        """Whether it is a path of this machine, a mounted file system included."""
        return URL.match(self.url) is None

    @property
    def location(self) -> Path | str:
        """The folder as a path, or as the URL that it is."""
        return Path(self.url) if self.is_local else self.url

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def local(self) -> Path:
        """The path of a local folder."""
        assert self.is_local
        return Path(self.url)

    def child(self, name: str) -> Storage:
        """A folder in this one."""
        return Storage(self.shown(name), self.options)

    @property
    def parent(self) -> Storage:
        """The folder that this one or this file is in."""
        above = self.url.rpartition("/")[0] or "/"
        return Storage(f"{above}/" if above.endswith(":/") else above, self.options)

    def shown(self, path: str) -> str:
        """The place of a file, for messages."""
        return f"{self.url.rstrip('/')}/{path}"

    def entries(self) -> list[Entry]:
        """What lies directly in the folder, by name; nothing where there is no folder."""

        def listed(fs: Any, root: str) -> list[Entry]:
            try:
                found = [_entry(raw, root) for raw in fs.ls(root, detail=True)]
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted((e for e in found if e.path), key=lambda e: e.path)

        return self._do("listing", listed)

    def files(self) -> list[Entry]:
        """All files in the folder and in folders below it, by path."""

        def found(fs: Any, root: str) -> list[Entry]:
            raw = fs.find(root, detail=True).values()
            return [e for e in (_entry(r, root) for r in raw) if e.path and not e.is_folder]

        below = _local_files(self.url) if self.is_local else self._do("listing", found)
        return sorted(below, key=lambda e: Path(e.path).parts)

    def stat(self, path: str = "") -> Entry | None:
        """A file, or the folder itself; None where there is nothing."""

        def asked(fs: Any, root: str) -> Entry | None:
            try:
                return _entry(fs.info(_joined(root, path)), root)
            except (FileNotFoundError, NotADirectoryError):
                return None

        return self._do("looking for a file", asked)

    def read_text(self, path: str) -> str:
        """The text of a file.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._do("reading", lambda fs, root: str(fs.cat_file(_joined(root, path)), "utf-8"))

    def read_end(self, path: str, size_bytes: int) -> bytes:
        """The last bytes of a file, all of them where it has fewer.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._do("reading", lambda fs, root: bytes(fs.tail(_joined(root, path), size_bytes)))

    def write_text(self, path: str, text: str) -> None:
        """Write a file, which appears at once: by its name here, as one object elsewhere."""
        if self.is_local:
            written = self.local / f".{path}.{uuid.uuid4().hex[:8]}"
            written.write_text(text)
            written.replace(self.local / path)
        else:
            self._do("writing", lambda fs, root: _write_object(fs, root, path, text.encode()))

    def remove(self, path: str = "") -> None:
        """Remove a file, or the folder with all in it, where it is there."""
        if self.is_local and not path:
            shutil.rmtree(self.local, ignore_errors=True)
            return

        def removed(fs: Any, root: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm(_joined(root, path), recursive=not path)

        self._do("deleting", removed)

    def parquet(self, path: str, **options: Any) -> pq.ParquetFile:
        """Open a Parquet file; ``options`` are those of ``pyarrow.parquet.ParquetFile``.

        Raises:
            FileNotFoundError: there is none.
        """
        if self.is_local:
            return pq.ParquetFile(self.local / path, **options)

        def opened(fs: Any, root: str) -> pq.ParquetFile:
            full = _joined(root, path)
            # All who open a file in memory share one cursor.
            source = pa.BufferReader(fs.cat_file(full)) if isinstance(fs, MemoryFileSystem) else fs.open(full, "rb")
            return pq.ParquetFile(source, pre_buffer=True, **options)

        return self._do("reading", opened)

    def _do(self, doing: str, call: Callable[[Any, str], T]) -> T:
        """``call`` the file system with it and the folder's path in it. What goes wrong outside this machine tells
        where, and no secret."""
        try:
            if self.is_local:
                return call(fsspec.filesystem("file"), self.url)
            fs, root = fsspec.url_to_fs(self.url, **self.options)
            fs.invalidate_cache()  # Spark and other processes write there
            return call(fs, root.rstrip("/") if root.strip("/") else root)
        except (TfdistError, FileNotFoundError, pa.ArrowException):
            raise
        except Exception as error:
            if self.is_local:
                raise
            raise DataError(f"{self.url}: {doing} failed; {self.without_secrets(error)}") from None

    def without_secrets(self, error: Exception) -> str:
        """The text of an error in which no option of this storage appears."""
        text = f"{type(error).__name__}: {error}"
        for secret in _texts(self.options):
            text = text.replace(secret, "***")
        return text


def _local_files(root: str) -> list[Entry]:
    found = []
    for folder, _, names in os.walk(root):
        for name in names:
            full = os.path.join(folder, name)
            with suppress(FileNotFoundError):
                stat = os.stat(full)
                path = os.path.relpath(full, root)
                found.append(Entry(path, stat.st_size, stat.st_mtime, str(stat.st_mtime_ns), False))
    return found


def _entry(raw: Mapping[str, Any], root: str) -> Entry:
    changed = next((raw[key] for key in _CHANGED if raw.get(key) is not None), 0.0)
    if isinstance(changed, str):
        with suppress(ValueError):
            changed = datetime.fromisoformat(changed.replace("Z", "+00:00"))
    seconds = changed.timestamp() if isinstance(changed, datetime) else changed
    return Entry(
        path=str(raw["name"])[len(root) :].strip("/"),
        size_bytes=int(raw.get("size") or 0),
        changed_at=float(seconds) if isinstance(seconds, int | float) else 0.0,
        version=str(next((raw[key] for key in _VERSIONS if raw.get(key)), changed)),
        is_folder=raw["type"] == "directory",
    )


def _joined(root: str, path: str) -> str:
    return f"{root.rstrip('/')}/{path}" if path else root


def _write_object(fs: Any, root: str, path: str, content: bytes) -> None:
    try:
        fs.pipe_file(_joined(root, path), content)
    except FileNotFoundError:  # a file system with folders
        fs.makedirs(root, exist_ok=True)
        fs.pipe_file(_joined(root, path), content)


def _texts(value: Any) -> list[str]:
    """The texts in a value that are long enough to be secrets, the longest first."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sorted((text for each in value for text in _texts(each)), key=len, reverse=True)
    return [value] if isinstance(value, str) and len(value) > 3 else []
