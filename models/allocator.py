"""The C library's allocator, set for steps that need the same memory again and again."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h's numbers for what mallopt sets


def keep_freed_memory() -> None:
    """Have freed memory stay with this process, for its next step; with glibc, elsewhere nothing changes.

    Large tensors are otherwise given back to the system when they are freed, and each of their pages is
    fetched, and zeroed, anew: a quarter of a million pages a step of the source's setup. Peak memory
    may be a fifth larger.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
