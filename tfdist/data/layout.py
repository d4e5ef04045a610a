"""Columns as rows of fixed width, and back: a row that lies together is found and copied at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tfdist.data.values import aligned

_TOGETHER_BYTES = 2**18  # rows that stay in the processor's cache between gathering and dealing out


class Layout:
    """How the values of a row lie in it.

    Args:
        dtypes: of each column, a sub-array where its values have a shape.

    Attributes:
        dtype: of a row.
        together: rows that are best treated at a time.
    """

    def __init__(self, dtypes: Sequence[np.dtype[Any]]) -> None:
        self._dtypes = list(dtypes)
        # The widest first, so that no value lies across an address it should not.
        places = sorted(range(len(dtypes)), key=lambda i: -dtypes[i].base.alignment)
        self.dtype = np.dtype([(str(i), dtypes[i]) for i in places], align=True)
        self.together = max(1, _TOGETHER_BYTES // max(1, self.dtype.itemsize))

    def pack(self, columns: Sequence[np.ndarray], out: np.ndarray) -> None:
        """Columns to rows.

        Args:
            columns: each ``[n, ...]``.
            out: ``[n]`` of :attr:`dtype`.
        """
        for start in range(0, len(out), self.together):
            rows = out[start : start + self.together]
            for i, values in enumerate(columns):
                rows[str(i)] = values[start : start + len(rows)]

    def take(self, rows: np.ndarray, places: np.ndarray) -> list[np.ndarray]:
        """The columns of some rows, in memory that TensorFlow can take over.

        Args:
            rows: ``[m]`` of :attr:`dtype`.
            places: ``[n] int64``, below m.

        Returns:
            Each ``[n, ...]``.
        """
        if not self._dtypes:
            return []
        outs = [aligned((len(places), *dtype.shape), dtype.base) for dtype in self._dtypes]
        raw = rows.view(np.dtype((np.void, self.dtype.itemsize)))
        in_a_row = len(places) and places[-1] - places[0] == len(places) - 1 and bool((np.diff(places) == 1).all())
        gathered = np.empty(min(self.together, len(places)), raw.dtype)
        for start in range(0, len(places), self.together):
            stop = min(start + self.together, len(places))
            if in_a_row:
                chosen = raw[places[start] : places[start] + stop - start]
            else:  # places are in range; with the mode "raise" numpy would gather into a copy first
                chosen = np.take(raw, places[start:stop], out=gathered[: stop - start], mode="wrap")
            fields = chosen.view(self.dtype)
            for i, out in enumerate(outs):
                out[start:stop] = fields[str(i)]
        return outs
