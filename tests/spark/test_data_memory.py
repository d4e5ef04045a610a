"""What the pipeline holds in memory: it does not grow with epochs, nor with the rows of the data."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

MIB = 2**20
ROW_GROUP, FILE_ROWS = 500, 5000
# In a process of its own: what other tests have left in this one's heap would hide what is looked for.
PROGRAM = """
import gc, json, sys, psutil
from tfdist.data import from_parquet

folder, shuffle, warm, epochs = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
own = psutil.Process()

def held():  # pages of files that lie in memory belong to the system, which takes them back when it needs them
    memory = own.memory_info()
    return memory.rss - memory.shared

dataset = from_parquet(folder).to_tf(global_batch=500, shuffle=shuffle, pool_bytes=2**20)
at_start, peak, after = held(), 0, []
for epoch in range(warm + epochs):
    rows = 0
    for batch in dataset:
        rows += len(batch["id"])
        peak = max(peak, held())
    gc.collect()
    after.append(held())
print(json.dumps({"rows": rows, "grown": peak - at_start, "after": after[warm:]}))
"""


def write(folder: Path, rows: int) -> Path:
    """Numbers, texts and lists, about 140 bytes in memory a row; no two texts are the same."""
    folder.mkdir()
    ids = np.arange(rows)
    splits = np.concatenate([[0], np.cumsum(ids % 5)])
    values = np.random.default_rng(0).random((rows, 12))
    table = pa.table(
        {
            "id": ids,
            "text": [f"text {i}" for i in ids],
            "list": pa.ListArray.from_arrays(splits, pa.array(np.repeat(ids, ids % 5))),
            **{f"x{i}": column for i, column in enumerate(values.T)},
        }
    )
    for start in range(
        0, rows, FILE_ROWS
    ):  # in files, since what a file says of its row groups is held while it is open
        part = table.slice(start, FILE_ROWS)
        pq.write_table(part, folder / f"part-{start:07}.parquet", row_group_size=ROW_GROUP)
    return folder


def measured(folder: Path, shuffle: Any, warm: int, epochs: int) -> dict[str, Any]:
    """What a process that reads epoch after epoch has in memory, in bytes."""
    command = [sys.executable, "-c", PROGRAM, str(folder), json.dumps(shuffle), str(warm), str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("shuffle", [True, "pool", False])
def test_twenty_epochs_hold_no_more_than_the_first_ones(tmp_path: Path, shuffle: Any) -> None:
    """Texts, lists and numbers, epoch after epoch: the last ones end with the memory of the first, to 2 %."""
    found = measured(write(tmp_path / "data", 20_000), shuffle, warm=6, epochs=20)
    assert found["rows"] == 20_000
    first, last = (statistics.median(part) for part in (found["after"][:7], found["after"][-7:]))
    assert last < 1.02 * first + 4 * MIB, found["after"]


@pytest.mark.parametrize("shuffle", [True, "pool", False])
def test_memory_does_not_grow_with_the_rows(tmp_path: Path, shuffle: Any) -> None:
    """With a small pool, eight times the rows take far less additional memory than their own size."""
    small, large = (
        measured(write(tmp_path / str(rows), rows), shuffle, warm=0, epochs=1) for rows in (60_000, 480_000)
    )
    assert large["rows"] == 8 * small["rows"]
    more = 420_000 * 140
    assert large["grown"] < small["grown"] + 0.4 * more, (small, large)
