"""Row groups of Parquet files as tensors."""

from __future__ import annotations

from collections import OrderedDict

import pyarrow as pa
import pyarrow.parquet as pq

from tfdist.data.arrow import member_of, values_of
from tfdist.data.column import Column
from tfdist.data.folder import footer_digest
from tfdist.data.manifest import Manifest
from tfdist.data.tables import tensors_of
from tfdist.data.values import Values
from tfdist.errors import DataError

Group = list[Values]
"""The tensors of a row group, each ``[rows, *shape]``."""

_OPEN_FILES = 16
_FEW = 2  # bytes of distinct texts for each row


class RowGroups:
    """Reads row groups by their number in the order of the source; for one thread.

    Args:
        manifest: the data set.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._places = [
            (f, i) for f, fragment in enumerate(manifest.fragments) for i in range(len(fragment.row_groups))
        ]
        self._open: OrderedDict[int, pq.ParquetFile] = OrderedDict()

    def read(self, group: int) -> Group:
        """The tensors of a row group.

        Raises:
            DataError: the file is not there or was changed, or a value does not fit its column.
        """
        number, place = self._places[group]
        fragment, schema = self._manifest.fragments[number], self._manifest.schema
        # One thread: decoding has one core, TensorFlow the others; more threads disturb each other.
        options = {"columns": [_leaf(c) for c in schema.columns], "use_threads": False}
        try:
            table = self._file(number).read_row_group(place, **options)
        except pa.lib.ArrowCapacityError:  # a dictionary ends at 2 GiB of distinct texts
            with self._manifest.storage.parquet(fragment.path, coerce_int96_timestamp_unit="us") as plain:
                table = plain.read_row_group(place, **options)
        if table.num_rows != fragment.row_groups[place]:
            raise self._changed(number, f"{table.num_rows} rows in row group {place}")
        return tensors_of(schema, {c.name: self._values(table, c, number, place) for c in schema.columns})

    def _values(self, table: pa.Table, column: Column, number: int, place: int) -> tuple[Values, ...]:
        try:
            own = table.column(table.schema.get_field_index(column.file_name))
            return values_of(member_of(own, column.member), column)
        except DataError as error:
            raise DataError(f"{error} (row group {place} of {self._path(number)})") from error

    def _file(self, number: int) -> pq.ParquetFile:
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        if len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        path = self._path(number)
        fragment, open_file = self._manifest.fragments[number], self._manifest.storage.parquet
        try:
            opened = open_file(fragment.path, coerce_int96_timestamp_unit="us")
            if text := self._repeating(opened.metadata):
                opened.close()
                opened = open_file(
                    fragment.path, read_dictionary=text, coerce_int96_timestamp_unit="us", metadata=opened.metadata
                )
        except FileNotFoundError as error:
            raise DataError(f"{path}: not found; the data must lie where every worker sees it") from error
        if fragment.footer and footer_digest(self._manifest.storage, fragment.path) != fragment.footer:
            raise self._changed(number, "another footer")
        if opened.metadata.num_row_groups != len(self._manifest.fragments[number].row_groups):
            raise self._changed(number, f"{opened.metadata.num_row_groups} row groups")
        self._open[number] = opened
        return opened

    def _repeating(self, footer: pq.FileMetaData) -> list[str]:
        """The texts that are better read as codes and distinct values, as the file has them.

        To find equal ones among those that the file has one by one costs more than to read all the rest.
        """
        names = {_leaf(c) for c in self._manifest.schema.columns if c.dtype == "string"}
        if not names or not footer.num_row_groups:
            return []
        group = footer.row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        return [
            c.path_in_schema
            for c in columns
            if c.path_in_schema in names and _dictionary_bytes(c) < _FEW * c.num_values
        ]

    def _path(self, number: int) -> str:
        return self._manifest.storage.shown(self._manifest.fragments[number].path)

    def _changed(self, number: int, got: str) -> DataError:
        rows = list(self._manifest.fragments[number].row_groups)
        return DataError(f"{self._path(number)}: expected row groups of {rows} rows, got {got}; the file was changed")


def _leaf(column: Column) -> str:
    """A column's name in the files, as Parquet gives a path."""
    return ".".join((column.file_name, *column.member))


def _dictionary_bytes(column: pq.ColumnChunkMetaData) -> float:
    """Of its distinct values in the file, compressed; infinite where it has all values one by one."""
    return column.data_page_offset - column.dictionary_page_offset if column.has_dictionary_page else float("inf")
