"""Columns as rows of fixed width, and back: a row that lies together is found and copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.data.values import ALIGNMENT, aligned

_TOGETHER_BYTES = 2**18  # rows that stay in the processor's cache between gathering and dealing out


class Layout:
    """How the values of a row lie in it: columns of one type beside each other, the widest first.

    Args:
        dtypes: of each column, a sub-array where its values have a shape.

    Attributes:
        dtype: of a row.
        together: rows that are best treated at a time.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]]) -> None:
        kinds: dict[np.dtype[Any], list[int]] = {}
        for i, dtype in enumerate(dtypes):
            kinds.setdefault(dtype, []).append(i)
        # So that no value lies across an address it should not.
        self._kinds = sorted(kinds.items(), key=lambda kind: -kind[0].base.alignment)
        self._columns = len(dtypes)
        fields = [(str(k), dtype.base, (len(of), *dtype.shape)) for k, (dtype, of) in enumerate(self._kinds)]
        self.dtype = np.dtype(fields, align=True)
        self.together = max(1, _TOGETHER_BYTES // max(1, self.dtype.itemsize))

    def pack(self, columns: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Columns to rows.

        Args:
            columns: each ``[n, ...]``.
            out: ``[n]`` of :attr:`dtype`.
        """
        for start in range(0, len(out), self.together):
            rows = out[start : start + self.together]
            for k, (_, of) in enumerate(self._kinds):
                field = rows[str(k)]
                for place, i in enumerate(of):
                    field[:, place] = columns[i][start : start + len(rows)]

    def take(self, rows: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        """The columns of some rows, in memory that TensorFlow can take over.

        Args:
            rows: ``[m]`` of :attr:`dtype`.
            places: ``[n] int64``, below m.

        Returns:
            Each ``[n, ...]``.
        """
        if not self._columns:
            return []
        n = len(places)
        room = -(-n // ALIGNMENT) * ALIGNMENT  # so that each column begins at an address that is aligned
        outs = [aligned((len(of), room, *dtype.shape), dtype.base) for dtype, of in self._kinds]
        raw = rows.view(np.dtype((np.void, self.dtype.itemsize)))
        in_a_row = n and places[-1] - places[0] == n - 1 and bool((np.diff(places) == 1).all())
        gathered = np.empty(min(self.together, n), raw.dtype)
        for start in range(0, n, self.together):
            stop = min(start + self.together, n)
            if in_a_row:
                chosen = raw[places[start] : places[start] + stop - start]
            else:  # places are in range; with the mode "raise" numpy would gather into a copy first
                chosen = np.take(raw, places[start:stop], out=gathered[: stop - start], mode="wrap")
            fields = chosen.view(self.dtype)
            for k, out in enumerate(outs):
                out[:, start:stop] = fields[str(k)].swapaxes(0, 1)
        columns: dict[int, np.ndarray] = {}
        for (_, of), out in zip(self._kinds, outs, strict=True):
            columns |= {i: out[place, :n] for place, i in enumerate(of)}
        return [columns[i] for i in range(self._columns)]
