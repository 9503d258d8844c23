"""A command that gets no more memory ends with a failure of its own, not as a bug, whatever noticed it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest

from cutline.cli.output.failure import failure_of
from cutline.snapshots.operations.operation import code_of
from cutline.spark.start import _start_error
from cutline.storage.errors import IndeterminateError, RefusedError
from cutline.storage.store import StoreUnreachableError


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
        RuntimeError("can't start new thread"),
        ImportError("libarrow.so.2600: failed to map segment from shared object"),
        caused(ImportError("no numpy"), ImportError("libgfortran.so.5: cannot allocate memory in static TLS block")),
    ],
    ids=repr,
)
def test_it_is_no_bug(error: Exception) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.slug, failure.details) == (6, "too-little-memory", {})
    assert failure.message == ": ".join(filter(None, ["too little memory", str(error)]))
    assert failure.hint.startswith("allow the command more memory")
    # As the outcome and the metrics have it.
    assert code_of(error) == 6


def test_an_error_that_says_what_has_happened_is_kept() -> None:
    failure = failure_of(caused(RefusedError("no", hint="do"), MemoryError()))
    assert (failure.code, failure.slug, failure.message, failure.hint) == (3, "refused", "no", "do")


USED_UP = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (USED_UP, 6),
        (caused(RefusedError("no"), USED_UP), 6),
        (caused(StoreUnreachableError(url="file:///s", reason="it"), USED_UP), 6),
        (caused(IndeterminateError("perhaps"), USED_UP), 5),
        (RefusedError("no"), 3),
        (caused(RefusedError("no"), MemoryError()), 3),
        (psycopg.errors.OutOfMemory("out of memory"), 70),
        (ZeroDivisionError(), 70),
    ],
    ids=repr,
)
def test_the_outcome_has_the_code_of_the_command(error: Exception, code: int) -> None:
    assert (code_of(error), failure_of(error).code) == (code, code)


# Each in a process that gets little more memory than it has.
LITTLE = """
import resource, sys, threading
from pathlib import Path
from types import SimpleNamespace
from cli import main

def stand_in(what: str) -> None:
    megabytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() >> 20
    resource.setrlimit(resource.RLIMIT_AS, (megabytes + 7 << 20,) * 2)
    threading.stack_size(64 << 20)
    if what == "import":
        import numpy
    threading.Thread(target=print).start()

sys.modules["stand_in"] = SimpleNamespace(stand_in=stand_in)
main.COMMANDS["stand-in"] = main.CommandEntry("stand_in", "stand_in", "Stand in.")
main.main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it has no /proc")
@pytest.mark.parametrize(("what", "reason"), [("import", "Cannot allocate memory"), ("thread", "start new thread")])
def test_numpy_is_not_loaded_and_no_thread_started_without_memory(what: str, reason: str) -> None:
    done = subprocess.run([sys.executable, "-c", LITTLE, "stand-in", what], capture_output=True, text=True, check=False)
    assert (done.returncode, reason in done.stderr) == (6, True), done
    assert done.stderr.startswith("error: too little memory: "), done


def test_a_jvm_without_memory_is_no_refusal(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "Error occurred during initialization of VM\nCould not reserve enough space for 6170624KB object heap\n"
        "spark-class: line 97: CMD: bad array subscript\n"
    )
    failure = failure_of(_start_error(RuntimeError("[JAVA_GATEWAY_EXITED]"), log))
    assert (failure.code, failure.slug) == (6, "too-little-memory")
    assert "spark did not start: Could not reserve enough space for 6170624KB object heap" in failure.message
    assert "driver.memory in [spark]" in failure.hint
