"""A command that gets no more memory ends with a failure of its own, not as a bug, whatever noticed it."""

from __future__ import annotations

import errno
import os
import sys

import pyarrow as pa
import pytest

from cli.output.failure import failure_of
from snapshots.operations.operation import code_of
from storage.errors import RefusedError


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


def error_of_python() -> Exception:
    with pytest.raises(MemoryError) as raised:
        bytearray(sys.maxsize)
    return raised.value


def error_of_arrow() -> Exception:
    with pytest.raises(pa.ArrowMemoryError) as raised:
        pa.allocate_buffer(sys.maxsize - 1024)
    return raised.value


@pytest.mark.parametrize(
    "error",
    [
        error_of_python(),
        error_of_arrow(),
        OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)),
        caused(RuntimeError("it ended"), MemoryError()),
    ],
    ids=repr,
)
def test_it_is_no_bug(error: Exception) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.slug, failure.details) == (6, "too-little-memory", {})
    assert failure.message == ": ".join(filter(None, ["too little memory", str(error)]))
    assert failure.hint.startswith("give the command more memory")
    # As the outcome and the metrics have it.
    assert code_of(error) == 6


def test_an_error_that_says_what_has_happened_is_kept() -> None:
    failure = failure_of(caused(RefusedError("no", hint="do"), MemoryError()))
    assert (failure.code, failure.slug, failure.message, failure.hint) == (3, "refused", "no", "do")


def test_the_outcome_has_the_code_of_used_up_files() -> None:
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    assert (code_of(error), failure_of(error).code) == (6, 6)
    assert code_of(ZeroDivisionError()) == 70
