"""Writes checkpoints in a thread, while the training goes on."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tfdist.launch.protocol import emit
from tfdist.train.checkpoint import (
    Manifest,
    RankState,
    clear_partials,
    complete,
    partial_folder,
    prune,
    seals,
    write_rank,
)

_POLL_S = 0.05
PEERS_TIMEOUT_S = 300.0
"""How long the chief waits for the files of the other ranks before it gives a checkpoint up."""


class CheckpointWriter:
    """The checkpoints of one launch, one write at a time; a failed one is told, and leaves the last good one.

    Args:
        folder: where they go; all ranks see it.
        keep: how many are kept.
        rank: of this worker; rank 0 completes what all have written.
        tell: receives what happened, by default the driver.
    """

    def __init__(self, folder: Path, keep: int, rank: int, tell: Callable[..., None] = emit) -> None:
        self._folder, self._keep, self._rank, self._tell = folder, keep, rank, tell
        self._thread: threading.Thread | None = None
        self._leaving = threading.Event()

    def save(self, manifest: Manifest, state: RankState) -> None:
        """Begin to write; waits for the write before, so that a slow disk cannot pile up copies in memory.

        Args:
            manifest: what the checkpoint is of, without files.
            state: of this rank; nobody changes its arrays any more.
        """
        self.wait()
        self._thread = threading.Thread(target=self._write, args=(manifest, state), name="tfdist-checkpoint")
        self._thread.start()

    def wait(self) -> None:
        """Until the write in flight is over."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        """Give up waiting for other ranks: the training has failed."""
        self._leaving.set()
        self.wait()

    def _write(self, manifest: Manifest, state: RankState) -> None:
        began = time.perf_counter()
        partial = partial_folder(self._folder, manifest.position.total, manifest.run_id)
        try:
            if self._rank == 0:
                clear_partials(self._folder, but=partial)
            write_rank(partial, self._rank, state)
            if self._rank == 0 and self._finish(partial, manifest):
                position = manifest.position
                seconds = time.perf_counter() - began
                self._tell("checkpoint", step=position.total, epoch=position.epoch, seconds=seconds)
        except OSError as error:
            self._tell("checkpoint-failed", step=manifest.position.total, error=str(error))
            if self._rank == 0:
                shutil.rmtree(partial, ignore_errors=True)
            else:
                self._refuse(partial)

    def _refuse(self, partial: Path) -> None:
        try:
            (partial / f"rank-{self._rank:05d}.npz").unlink(missing_ok=True)
            (partial / f"rank-{self._rank:05d}.failed").touch()
        except OSError:
            pass  # the chief waits in vain for its time

    def _finish(self, partial: Path, manifest: Manifest) -> bool:
        deadline = time.monotonic() + PEERS_TIMEOUT_S
        while (files := seals(partial, manifest.world_size)) is None:
            if self._leaving.wait(_POLL_S):
                return False
            if any(partial.glob("*.failed")):  # that rank has told why
                shutil.rmtree(partial, ignore_errors=True)
                return False
            if time.monotonic() > deadline:
                raise TimeoutError(f"the files of all ranks were not in {partial} after {PEERS_TIMEOUT_S:.0f} s")
        complete(partial, replace(manifest, files=files))
        prune(self._folder, self._keep)
        return True
