"""The limit on open files: raised to the hard one, and named whatever hides it; many nodes take few threads."""

from __future__ import annotations

import _thread
import errno
import os
import resource
import subprocess
import sys
import threading
import time

import psycopg
import pytest

from cutline.cli.output.failure import failure_of
from cutline.nodes.daemon_threads import THREADS_MAX
from cutline.nodes.sessions import in_parallel
from cutline.snapshots.operations.operation import code_of
from cutline.storage.errors import IndeterminateError, SnapshotError
from cutline.storage.open import open_store
from cutline.storage.process_limits import is_used_up
from cutline.storage.store import AnswerLostError, StoreUnreachableError, WritingRefusedError

# Nobody listens there.
CLOSED = "http://127.0.0.1:9"
USED_UP = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
SHOW = (
    "import resource; from cutline.storage.process_limits import raise_limit; "
    "raise_limit(); print(*resource.getrlimit(7))"
)


def caused(error: Exception, cause: BaseException) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.skipif(resource.RLIMIT_NOFILE != 7, reason="another system")
@pytest.mark.parametrize(("soft", "hard"), [(32, 64), (64, 64)])
def test_the_limit_is_raised_to_the_hard_one(soft: int, hard: int) -> None:
    line = f"ulimit -Sn {soft} && ulimit -Hn {hard} && exec {sys.executable} -c '{SHOW}'"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(hard)] * 2


@pytest.mark.parametrize(
    "error",
    [
        USED_UP,
        caused(RuntimeError("no loop"), USED_UP),
        caused(StoreUnreachableError(url="file:///s", reason="it"), USED_UP),
        caused(WritingRefusedError(url="file:///s", reason="it"), USED_UP),
        # As a task reports it, and as libpq says it.
        StoreUnreachableError(url="file:///s", reason="too many open files"),
        psycopg.OperationalError("connection failed: could not create socket: Too many open files"),
    ],
    ids=repr,
)
def test_it_is_named_whatever_was_taken_for_the_reason(error: Exception) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.slug) == (6, "open-files")
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert failure.message.startswith(f"the limit of {limit} open files and connections (ulimit -n) has been reached: ")
    assert "LimitNOFILE=16384" in failure.hint
    assert failure.details["limit"] == limit


def test_the_limit_of_the_machine_is_told_apart() -> None:
    failure = failure_of(OSError(errno.ENFILE, os.strerror(errno.ENFILE)))
    assert (failure.code, failure.slug) == (6, "open-files")
    assert failure.message.startswith("the machine's limit on open files (fs.file-max) has been reached: ")
    assert "sysctl fs.file-max" in failure.hint


def test_an_error_that_says_what_has_happened_keeps_its_code() -> None:
    error = caused(AnswerLostError(url="file:///s", key="k", reason="it"), USED_UP)
    assert isinstance(error, IndeterminateError)
    failure = failure_of(error)
    assert (failure.code, failure.slug, failure.message) == (5, "answer-lost", error.message)
    assert failure.hint.startswith(error.hint)
    assert failure.hint.endswith("limits.conf")


OF_SERVER = psycopg.errors.InsufficientResources('could not open file "base/5/1259": Too many open files')


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "no space left"),
        SnapshotError("too many"),
        ValueError(),
        # A server's own limit: while it answers, and while it refuses a connection.
        OF_SERVER,
        caused(SnapshotError(f"node s1: {OF_SERVER}"), OF_SERVER),
        psycopg.OperationalError('connection failed: FATAL:  could not open file "base/5": Too many open files'),
    ],
    ids=repr,
)
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    assert not is_used_up(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device", "/tmp/x"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        caused(RuntimeError("a job failed"), OSError(errno.ENOSPC, "No space left on device")),
        # As Spark passes it on, with its stack.
        RuntimeError("An error occurred\n: java.io.IOException: No space left on device\n\tat java.base/x.y\n"),
    ],
    ids=repr,
)
def test_a_full_folder_for_temporary_files_is_no_bug(error: Exception) -> None:
    failure = failure_of(error)
    assert (failure.code, failure.slug) == (6, "no-space")
    assert failure.message.startswith("no space is left for temporary files: ")
    assert "\n" not in failure.message
    assert "TMPDIR" in failure.hint
    assert code_of(error) == 6


@pytest.mark.parametrize(
    "error",
    [
        StoreUnreachableError(url="file:///s", reason="no space left on device"),
        SnapshotError("no space left on device"),
        psycopg.errors.DiskFull("could not extend file: No space left on device"),
        RuntimeError("ERROR:  could not extend file: No space left on device"),
    ],
    ids=repr,
)
def test_another_disk_is_not_taken_for_it(error: Exception) -> None:
    assert failure_of(error).slug != "no-space"


def test_many_nodes_take_few_threads_and_results_stay_in_order() -> None:
    most, lock, now = 0, threading.Lock(), 0

    def work(number: int) -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.002)
        with lock:
            now -= 1
        return number * number

    assert in_parallel(work, range(500)) == [number**2 for number in range(500)]
    assert 1 < most <= THREADS_MAX


def test_an_interrupt_begins_no_more_work() -> None:
    begun: list[int] = []
    ended = threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            # In the main thread, which waits.
            _thread.interrupt_main()
        ended.wait(20)

    with pytest.raises(KeyboardInterrupt):
        in_parallel(work, range(THREADS_MAX * 3), ended.set)
    assert len(begun) <= THREADS_MAX * 2


def test_a_request_to_a_store_without_a_descriptor_for_its_connection_names_the_limit() -> None:
    few = {"retries": {"total_max_attempts": 1}}
    store = open_store("s3://bucket", {"endpoint_url": CLOSED, "key": "k", "secret": "s", "config_kwargs": few})
    with pytest.raises(StoreUnreachableError) as raised:
        store.list("")
    assert not is_used_up(raised.value)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free, hard))
    try:
        with pytest.raises(StoreUnreachableError, match="can't connect") as raised:
            store.list("")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failure_of(raised.value).message.startswith("the limit of ")
