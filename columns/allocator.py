"""Limit the memory that libraries take in our processes; must run before they are loaded.

Arrow uses the C library's allocator. Arrow's own allocators keep freed memory, and copy a large buffer that grows. With
values of hundreds of megabytes a process would take the size of a whole value more (measured); with small values there
is no difference. Arrow reads the variable when it is loaded.

OpenBLAS, numpy's library for linear algebra, which nothing here uses, takes memory for a thread for each core when it
is loaded. Where it gets none it ends the process with exit code 1, or raises SIGINT as if somebody had pressed Ctrl-C.
"""

from __future__ import annotations

import mmap
import os
import sys
from importlib.machinery import ModuleSpec

VARIABLE, SYSTEM = "ARROW_DEFAULT_MEMORY_POOL", "system"
THREADS_VARIABLE, ONE_THREAD = "OPENBLAS_NUM_THREADS", "1"
# More than numpy and its libraries take of the address space, with one thread.
NUMPY_BYTES = 128 << 20


class _NumpyGuard:
    """Lets the import of numpy raise OSError (ENOMEM) where OpenBLAS would get no memory."""

    @staticmethod
    def find_spec(name: str, *_: object) -> ModuleSpec | None:
        """Find nothing: as a finder it is asked before the others."""
        if name == "numpy":
            mmap.mmap(-1, NUMPY_BYTES).close()
        return None


def choose_allocator() -> None:
    """Set the variables for this process and those that it starts, Arrow's unless the user has."""
    os.environ.setdefault(VARIABLE, SYSTEM)
    os.environ[THREADS_VARIABLE] = ONE_THREAD
    sys.meta_path.insert(0, _NumpyGuard)
