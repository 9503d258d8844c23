"""Keep the driver's libpq from writing on stderr while it opens a session.

Before a session begins the server may warn, for example about a database whose collation version differs. It ignores
the session's client_min_messages, which it reads later (PostgreSQL's postinit.c). libpq writes such a warning on C's
`stderr` until its program gives it a function for warnings, which the driver does only once the session is open.
Between lines of progress or JSON, such a line has no context, so Cutline reports these warnings itself
(nodes/collation_versions.py).

So `stderr`, C's variable, leads nowhere meanwhile. The descriptor stays as it is: Python and programs that are started
write as ever.
"""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

_lock = threading.Lock()
# How many sessions are being opened, and what `stderr` was before the first of them.
_opening = 0
_before: int | None = None
_stream: int | None = None


@contextmanager
def quiet_connecting() -> Iterator[None]:
    """While the block runs, in any number of threads, C code writes nothing on stderr."""
    global _opening, _before  # C's variable is one for the process
    variable = _variable()
    if variable is None:
        yield
        return
    with _lock:
        if not _opening:
            _before, variable.value = variable.value, _nowhere() or variable.value
        _opening += 1
    try:
        yield
    finally:
        with _lock:
            _opening -= 1
            if not _opening:
                variable.value = _before


@cache
def _variable() -> ctypes.c_void_p | None:
    """C's `stderr`; None if it is not glibc's: elsewhere it has another name, or can't be changed."""
    if platform.libc_ver()[0] != "glibc":
        return None
    return ctypes.c_void_p.in_dll(ctypes.CDLL(None), "stderr")


def _nowhere() -> int | None:
    """A C stream that leads nowhere; None if no more files can be opened: then the session can't be, either."""
    global _stream  # one for the process
    if _stream is None:
        fopen = ctypes.CDLL(None).fopen
        fopen.restype, fopen.argtypes = ctypes.c_void_p, (ctypes.c_char_p, ctypes.c_char_p)
        _stream = fopen(os.fsencode(os.devnull), b"we")
    return _stream
