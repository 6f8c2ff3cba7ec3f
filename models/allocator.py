"""The C library's allocator: what it keeps of freed memory. With glibc; elsewhere nothing changes."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h's numbers for what mallopt sets


def keep_freed_memory() -> None:
    """Have freed memory stay with this process, for its next step.

    Large tensors are otherwise given back to the system when they are freed, and each of their pages is
    fetched, and zeroed, anew: a quarter of a million pages a step of the source's setup. Peak memory
    may be a fifth larger.
    """
    if is_glibc():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def give_back() -> None:
    """Give freed memory that stayed to the system."""
    if is_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def is_glibc() -> bool:
    return platform.libc_ver()[0] == "glibc"
