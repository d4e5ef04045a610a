"""The folder of a data set in a cache: found, written, published whole or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from tfdist.data.manifest import MANIFEST, Manifest
from tfdist.data.storage import Storage
from tfdist.errors import DataError

WRITING = "writing"


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
    """The files of a manifest that are not there, or have another size."""
    sizes = {file.path: file.size_bytes for file in manifest.storage.files()}
    return [f.path for f in manifest.fragments if sizes.get(f.path) != f.size_bytes]


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
            self.cache.local.mkdir(parents=True, exist_ok=True)
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
