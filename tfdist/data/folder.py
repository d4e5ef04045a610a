"""The folder of a data set in a cache: found, written, published whole or not at all."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

from tfdist.data.location import make_folder
from tfdist.data.manifest import MANIFEST, Fragment, Manifest
from tfdist.data.storage import Storage
from tfdist.errors import DataError

WRITING = "writing"
_THREADS = 8
_FOOTER_GUESS_BYTES = 64 * 2**10  # one read finds most footers


def held_manifest(folder: Storage, fingerprint: str) -> Manifest | None:
    """The manifest of a finished folder, when it is the one meant and all its files are whole."""
    try:
        manifest = Manifest.from_json(folder.read_text(MANIFEST), folder.url, folder.options)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None  # never finished, damaged, or of another version: written anew
    if manifest.fingerprint != fingerprint or missing_files(manifest):
        return None
    return manifest


def missing_files(manifest: Manifest) -> list[str]:
    """The files of a manifest that are not there, or have another size or another footer."""
    storage = manifest.storage
    sizes = {file.path: file.size_bytes for file in storage.files()}
    wrong = [f.path for f in manifest.fragments if sizes.get(f.path) != f.size_bytes]
    noted = [f for f in manifest.fragments if f.footer]
    if wrong or not noted:
        return wrong
    found = with_footers(storage, noted)
    return [f.path for f, now in zip(noted, found, strict=True) if f != now]


def with_footers(storage: Storage, fragments: Sequence[Fragment]) -> tuple[Fragment, ...]:
    """The fragments with the digests of the footers that their files have now."""
    with ThreadPoolExecutor(_THREADS) as threads:
        return tuple(threads.map(lambda f: replace(f, footer=footer_digest(storage, f.path)), fragments))


def footer_digest(storage: Storage, path: str) -> str:
    """16 hex digits of SHA-256 over the footer of a Parquet file, which says where all its values lie; empty where
    the file ends in none."""
    try:
        end = storage.read_end(path, _FOOTER_GUESS_BYTES)
        # https://parquet.apache.org/docs/file-format: the footer, its length in 4 bytes, PAR1
        length = int.from_bytes(end[-8:-4], "little") + 8
        if length > len(end):
            end = storage.read_end(path, length)
    except FileNotFoundError:
        return ""
    return hashlib.sha256(end[-length:]).hexdigest()[:16] if end.endswith(b"PAR1") else ""


@dataclass(frozen=True)
class Place:
    """Where a data set belongs.

    On a local path it is written under another name and renamed when whole. Object stores do not rename: there each
    writer has a folder of its own, which exists for readers once its manifest, the last file, is there.

    Args:
        cache: holds the data sets.
        name: of the folder, or what it begins with.
        fingerprint: of the data.
    """

    cache: Storage
    name: str
    fingerprint: str

    def held(self) -> Manifest | None:
        """The data set, when it is there and whole."""
        if self.cache.is_local:
            return held_manifest(self.cache.child(self.name), self.fingerprint)
        folders = [e.path for e in self.cache.entries() if e.is_folder and e.path.startswith(f"{self.name}-")]
        found = (held_manifest(self.cache.child(name), self.fingerprint) for name in folders)
        return next((manifest for manifest in found if manifest is not None), None)

    @contextmanager
    def writing(self) -> Iterator[Storage]:
        """A new folder to write to; it is gone afterwards unless it was published."""
        unique = uuid.uuid4().hex[:8]
        if self.cache.is_local:
            make_folder(self.cache.local, "cache_dir")
            folder = self.cache.child(f".{self.name}.{os.getpid()}-{unique}.{WRITING}")
            try:
                yield folder
            finally:
                folder.remove()
            return
        folder, mark = self.cache.child(f"{self.name}-{unique}"), f".{self.name}-{unique}.{WRITING}"
        self.cache.write_text(mark, "")
        try:
            yield folder
        finally:
            if folder.stat(MANIFEST) is None:
                folder.remove()
            self.cache.remove(mark)

    def publish(self, manifest: Manifest) -> Manifest:
        """Make the folder of a manifest the data set. Another writer of the same data may be faster: its folder stays.

        Raises:
            DataError: something removed files.
        """
        folder = manifest.storage
        folder.write_text(MANIFEST, manifest.to_json())
        if self.cache.is_local:
            self._move(folder)
            folder = self.cache.child(self.name)
        published = held_manifest(folder, self.fingerprint)
        if published is None:
            raise DataError(f"{folder.url}: files disappeared while they were written; did something clean the folder?")
        return published

    def _move(self, folder: Storage) -> None:
        if self.held() is not None:
            return
        target = self.cache.local / self.name
        if target.exists():
            damaged = folder.local.with_name(f"{folder.name}.old")
            with suppress(FileNotFoundError):  # another writer has moved it away
                target.rename(damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        try:
            folder.local.rename(target)
        except OSError:
            if self.held() is None:
                raise
