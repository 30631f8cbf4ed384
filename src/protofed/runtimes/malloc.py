"""Makes the C library keep the memory that a step has freed.

A step on the CPU asks for megabytes, frees them, and the next step asks for the same again. By default glibc returns
such memory to the system at once, which must then zero every page again.
"""

import ctypes
import sys

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""Names of glibc's settings in malloc.h."""
KEPT = 256 << 20
"""Bytes of freed memory that a process may keep."""
LARGEST = 32 << 20
"""Bytes of the largest block that is kept; glibc allows no more."""


def keep_freed_memory() -> None:
    """From now on this process, and those forked from it, keep freed memory for later use. Other C libraries than glibc
    have no such setting."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option is not None:
        set_option(TRIM_THRESHOLD, KEPT)
        set_option(MMAP_THRESHOLD, LARGEST)
