"""What the process's heap does with memory that was given back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

TOUCH = """
import ctypes, resource, sys
from tfdist.data.heap import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def take():
    place = libc.malloc(8 * 2**20)
    ctypes.memset(place, 1, 8 * 2**20)
    libc.free(place)
take()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    take()
    take()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(mode: str, **env: str) -> int:
    """Pages that a process touched for the first time while it used the same 8 MiB again and again."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    return int(subprocess.check_output([sys.executable, "-c", TOUCH, mode], text=True, env=kept | env))


@pytest.mark.skipif(sys.platform != "linux", reason="the setting is glibc's")
def test_freed_memory_is_used_again_without_touching_new_pages() -> None:
    """Buffers of megabytes cost no page faults once their memory was used, unless the user has set the heap."""
    pages = 8 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert faults("keep") < pages
    assert faults("keep", MALLOC_TRIM_THRESHOLD_="65536") > pages
