"""How the C library's heap treats memory that was given back."""

from __future__ import annotations

import ctypes
import os
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_KEPT_BYTES = 64 * 2**20
_HEAP_BYTES = 32 * 2**20  # the most that glibc accepts


@cache
def keep_freed_memory() -> None:
    """Have this process keep up to 64 MiB of freed memory in each of its heaps, and take buffers out of them.

    A pipeline frees and asks for buffers of megabytes all the time, in NumPy, Arrow and TensorFlow alike. As it is set
    by default, glibc gives each of them back to the system, and the first touch of each new page costs more than what
    is then done with it. Does nothing with another C library, and where the environment sets ``MALLOC_*`` variables of
    glibc or ``GLIBC_TUNABLES``.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES)
