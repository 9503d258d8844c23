"""Limit how much memory libraries take in our processes; must run before the libraries are loaded.

Arrow is set to use the C library's allocator. Arrow's own allocators keep freed memory, and copy a large buffer when it
grows. For a value of hundreds of megabytes, they would need that much memory again (measured); for small values there
is no difference. Arrow reads its environment variable when it is loaded.

OpenBLAS, numpy's library for linear algebra, is not used here, but allocates memory for one thread per core when it is
loaded. If that fails, it ends the process with exit code 1 or raises SIGINT, as if the user had pressed Ctrl-C.
"""

from __future__ import annotations

import mmap
import os
import sys
from importlib.machinery import ModuleSpec

VARIABLE, SYSTEM = "ARROW_DEFAULT_MEMORY_POOL", "system"
THREADS_VARIABLE, ONE_THREAD = "OPENBLAS_NUM_THREADS", "1"
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
    """Set the variables for this process and its children; keep Arrow's variable if the user has set it."""
    os.environ.setdefault(VARIABLE, SYSTEM)
    os.environ[THREADS_VARIABLE] = ONE_THREAD
    sys.meta_path.insert(0, _NumpyGuard)
