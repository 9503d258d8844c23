"""What C code writes on stderr while sessions are opened goes nowhere, and nothing else does."""

from __future__ import annotations

import ctypes
import os
import platform

import pytest

from cutline.wal.drain import peek as module
from cutline.wal.drain.peek import quiet_connecting

LIBC = ctypes.CDLL(None)
LIBC.fputs.argtypes = (ctypes.c_char_p, ctypes.c_void_p)


def write(text: bytes) -> None:
    """As libpq does."""
    LIBC.fputs(text, ctypes.c_void_p.in_dll(LIBC, "stderr"))


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's stderr can be changed")
def test_c_code_is_silent_until_the_last_session_is_open(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = quiet_connecting(), quiet_connecting()
    write(b"before ")
    first.__enter__()
    second.__enter__()
    write(b"lost ")
    # In another order than they began: threads do.
    first.__exit__(None, None, None)
    write(b"lost as well ")
    os.write(2, b"of Python ")
    second.__exit__(None, None, None)
    write(b"after")
    assert capfd.readouterr().err == "before of Python after"


def test_an_error_puts_it_back(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), quiet_connecting():
        raise KeyError
    write(b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's stderr can be changed")
def test_where_no_more_files_can_be_opened_the_session_says_so(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_stream", None)
    monkeypatch.setattr(module.os, "devnull", "/nowhere/at/all")
    with quiet_connecting():
        write(b"within ")
    write(b"after")
    assert capfd.readouterr().err == "within after"
