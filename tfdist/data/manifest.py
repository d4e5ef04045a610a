"""A data set as files: where its rows lie, how many there are, and what they are. Holds no rows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from tfdist.data.schema import Schema
from tfdist.data.storage import Storage

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Fragment:
    """One Parquet file with rows.

    Args:
        path: relative to the manifest's root.
        row_groups: rows in each row group.
        size_bytes: size of the file, by which a file that was replaced is noticed.
        footer: 16 hex digits of SHA-256 over the file's footer; empty where nobody noted it.
    """

    path: str
    row_groups: tuple[int, ...]
    size_bytes: int
    footer: str = ""


@dataclass(frozen=True)
class Manifest:
    """The files of a data set.

    Args:
        root: folder of the files: an absolute path or a URL.
        fragments: the files with rows, in the order of the source.
        schema: columns and tensors.
        fingerprint: 32 hex digits that differ where the data differs.
        row_bytes: bytes of a row in memory, on average.
        null_counts: nulls in each column of the files.
        dropped_rows: rows that the ``drop`` policies left out.
        ttl_days: days after its last use when the data may be deleted; None for never.
        storage_options: what fsspec needs to open a URL; may hold secrets, and is never written.
    """

    root: str
    fragments: tuple[Fragment, ...]
    schema: Schema
    fingerprint: str
    row_bytes: int = 1
    null_counts: Mapping[str, int] = field(default_factory=dict)
    dropped_rows: int = 0
    ttl_days: float | None = None
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def storage(self) -> Storage:
        """Where the files are."""
        return Storage(self.root, self.storage_options)

    @property
    def rows(self) -> int:
        return sum(sum(f.row_groups) for f in self.fragments)

    def to_json(self) -> str:
        """As JSON text, for :meth:`from_json`; the root is left out, so that a folder may be moved."""
        raw: dict[str, Any] = asdict(replace(self, storage_options={}))
        del raw["root"], raw["storage_options"]
        raw["schema"] = json.loads(self.schema.to_json())
        raw["null_counts"] = dict(self.null_counts)
        return json.dumps({"version": 1, "rows": self.rows, **raw})

    @staticmethod
    def from_json(text: str, root: str | Path, storage_options: Mapping[str, Any] | None = None) -> Manifest:
        """The manifest of a text that :meth:`to_json` made, with its files under ``root``."""
        raw = json.loads(text)
        fragments = (Fragment(**{**f, "row_groups": tuple(f["row_groups"])}) for f in raw["fragments"])
        return Manifest(
            root=str(root),
            fragments=tuple(fragments),
            schema=Schema.from_json(json.dumps(raw["schema"])),
            fingerprint=raw["fingerprint"],
            row_bytes=raw["row_bytes"],
            null_counts=raw["null_counts"],
            dropped_rows=raw["dropped_rows"],
            ttl_days=raw.get("ttl_days"),
            storage_options=storage_options or {},
        )
