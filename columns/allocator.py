"""How libraries allocate memory in our processes; must run before the libraries are loaded.

Arrow is set to use the C library's allocator. Arrow's own allocators keep freed memory, and copy a large buffer when it
grows. For a value of hundreds of megabytes, they would need that much memory again (measured); for small values there
is no difference. Arrow reads its environment variable when it is loaded.

By default, glibc's allocator returns large blocks to the kernel, which has to clear their pages when they are allocated
again, and gives each thread an arena of its own. Here it keeps freed memory in one arena that all threads share. Three
threads that read 1.1 GB of rows took 1.3 s instead of 1.9 s, and 650 MB instead of 940 MB (on two cores).

OpenBLAS, numpy's library for linear algebra, is not used here, but allocates memory for one thread per core when it is
loaded. If that fails, it ends the process with exit code 1 or raises SIGINT, as if the user had pressed Ctrl-C.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from importlib.machinery import ModuleSpec

VARIABLE, SYSTEM = "ARROW_DEFAULT_MEMORY_POOL", "system"
THREADS_VARIABLE, ONE_THREAD = "OPENBLAS_NUM_THREADS", "1"
# glibc's malloc.h. It lets M_MMAP_THRESHOLD be at most 32 MiB: larger blocks always return to the kernel.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
BLOCK_BYTES_MAX = 32 << 20
# How much is kept where no block in use lies above it; what lies below one is kept in any case.
FREE_TOP_BYTES_MAX = 128 << 20
# Variables in which users tune it themselves: those with the prefix, and one that is about other things, too.
TUNED_PREFIX, TUNABLES, OF_MALLOC = "MALLOC_", "GLIBC_TUNABLES", "glibc.malloc."
# More address space than numpy and its libraries take with one thread.
NUMPY_BYTES = 128 << 20


class _NumpyGuard:
    """Make importing numpy raise OSError (ENOMEM) if OpenBLAS would get no memory."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Test whether numpy would get enough memory; always return None, so that the other finders are asked."""
        if name == "numpy":
            mmap.mmap(-1, NUMPY_BYTES).close()
        return None


def choose_allocator() -> None:
    """Set the variables for this process and its children, and its use of memory; keep what the user has set."""
    keep_memory()
    os.environ.setdefault(VARIABLE, SYSTEM)
    os.environ[THREADS_VARIABLE] = ONE_THREAD
    sys.meta_path.insert(0, _NumpyGuard)


def keep_memory() -> None:
    """Let this process, and those that it forks, use freed memory again; only glibc needs to be told."""
    is_tuned = OF_MALLOC in os.environ.get(TUNABLES, "") or any(name.startswith(TUNED_PREFIX) for name in os.environ)
    if is_tuned or sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, 1)
        mallopt(M_MMAP_THRESHOLD, BLOCK_BYTES_MAX)
        mallopt(M_TRIM_THRESHOLD, FREE_TOP_BYTES_MAX)
