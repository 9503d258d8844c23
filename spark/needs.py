"""What a command needs from executors, how executors test it, and the errors of executors that fail."""

from __future__ import annotations

import errno
import json
import os
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from msgspec import Struct

from cutline.fleet.config import Node
from cutline.nodes.connections import connect
from cutline.storage.errors import ErrorReport, RefusedError, SnapshotError, error_of, report_of
from cutline.storage.location import StoreLocation
from cutline.storage.process_limits import OF_SERVER, TooLittleMemoryError, says_no_memory
from cutline.storage.store import ObjectMissingError
from cutline.storage.storing import create_or_find

WAIT_SECONDS = 60.0


class ExecutorUnfitError(RefusedError):
    """An executor lacks something that the tasks need, or has a different version of it."""


class StoreNotSharedError(RefusedError):
    """The store's URL leads an executor to a different store than the driver's: a folder on its own machine."""

    def __init__(self, url: str) -> None:
        super().__init__(
            f"what it sees at {url} is not this machine's store",
            hint="use a store that all machines share: s3://, or a network file system that all of them mount under the"
            " same path",
            details={"store": url},
        )


class ExecutorNeeds(Struct, frozen=True):
    """The store, whether tasks write to it, and the nodes that they connect to.

    `wait_seconds` is the time to wait for an executor. `key` and `body` belong to an object that the driver has read or
    stored. An executor stores its own object in `folder`, which is "" if tasks don't write.
    """

    store: StoreLocation
    nodes: tuple[Node, ...] = ()
    writes: bool = False
    wait_seconds: float = WAIT_SECONDS
    key: str = ""
    body: bytes = b""
    folder: str = ""


def check_needs(needs: ExecutorNeeds) -> tuple[ErrorReport | None, str]:
    """Test all needs; return the first problem, and the key of the stored object."""
    key = ""
    try:
        check_shared(needs)
        if needs.folder:
            name = f"{needs.folder}/{uuid.uuid4().hex}"
            create_or_find(needs.store.open(), name, name.encode())
            key = name
        # Many executors connect at the same time, so each starts with a random node.
        first = uuid.uuid4().int % max(len(needs.nodes), 1)
        for node in (*needs.nodes[first:], *needs.nodes[:first]):
            connect(node).close()
    except SnapshotError as error:
        return report_of(error), key
    return None, key


def check_shared(needs: ExecutorNeeds) -> None:
    """Raise StoreNotSharedError unless the store contains the driver's object; raise StoreUnreachableError."""
    store = needs.store.open()
    try:
        is_shared = store.read(needs.key) == needs.body
    except ObjectMissingError:
        is_shared = False
    if not is_shared:
        raise StoreNotSharedError(store.url)


# In the text that PythonException passes on, this marker precedes the report of the error that ended the task.
MARK = "cutline-error "
EXECUTOR = re.compile(r"\(TID \d+\) \((\S+) executor (\S+)\)")
TASK = re.compile(rf".*{EXECUTOR.pattern}: ")
LACKS_MODULE = re.compile(r"ModuleNotFoundError: No module named '([\w.]+)'")
OTHER_PYTHON = re.compile(r"\[PYTHON_VERSION_MISMATCH\] .*?different version: (\S+) than that in driver: (\S+?)[,.]? ")
# Matches the error number as Java 21 (error=2, …) and Java 25 (error: 2 (…)) print it.
NO_PYTHON = re.compile(r'Cannot run program "([^"]+)"[^\n]*?error[=:] ?(\d+)')
PYTHON_HINT = "set pyspark.python in [spark] of fleet.toml to a Python that every executor has: docs/spark.md"
FULL_HINT = "allow its user more processes (ulimit -u), or give its machine more memory"

MEMORY_HINT = (
    "give the executors more memory in [spark] of fleet.toml (executor.memory, executor.memoryOverhead), or run fewer"
    " tasks at once; tasks on this machine use its own memory, which may be limited by MemoryMax= of a systemd unit,"
    " by the container, or by ulimit -v"
)


class ExecutorPythonError(RefusedError):
    """An executor's Python can't run tasks."""


class ExecutorTaskError(Exception):
    """Ends a task with a SnapshotError, which the driver re-raises."""

    def __init__(self, error: SnapshotError) -> None:
        super().__init__(f"{MARK}{json.dumps(report_of(error))}")


def of_executor(error: SnapshotError, host: object, process: object) -> SnapshotError:
    """Return the error with the executor's name added."""
    report = report_of(error)
    report["message"] = f"executor on {host} (process {process}): {error.message}"
    report["details"] = error.details | {"host": host, "process": process}
    return error_of(report)


@contextmanager
def raising_executor_errors() -> Iterator[None]:
    """If the job in the block fails because an executor lacks something, raise an error that names both."""
    try:
        yield
    except SnapshotError:
        raise
    except Exception as error:
        executor_error = find_executor_error(str(error))
        if executor_error is None:
            raise
        raise executor_error from error


def find_executor_error(text: str) -> SnapshotError | None:
    """Find the executor's error in the text of a failed job; return None if the job failed for a different reason."""
    if MARK in text:
        report, _ = json.JSONDecoder().raw_decode(text, text.index(MARK) + len(MARK))
        return error_of(report)
    where = EXECUTOR.search(text)
    name = f"executor {where.group(2)} on {where.group(1)}" if where else "an executor"
    if lacking := LACKS_MODULE.search(text):
        return ExecutorPythonError(f"{name}: its Python has no module {lacking.group(1)}", hint=PYTHON_HINT)
    if other := OTHER_PYTHON.search(text):
        return ExecutorPythonError(
            f"{name}: its Python is {other.group(1)}, but this machine's is {other.group(2)}", hint=PYTHON_HINT
        )
    if program := NO_PYTHON.search(text):
        path, number = program.group(1), int(program.group(2))
        hint = FULL_HINT if number in {errno.EAGAIN, errno.ENOMEM} else PYTHON_HINT
        return ExecutorPythonError(f"{name}: it can't run {path}: {os.strerror(number)}", hint=hint)
    if no_memory := next(
        (line for line in text.splitlines() if says_no_memory(line) and not OF_SERVER.search(line)), ""
    ):
        return TooLittleMemoryError(f"{name}: {TASK.sub('', no_memory).strip()}", hint=MEMORY_HINT)
    return None


def is_of_connection(error: BaseException) -> bool:
    """Whether the error, or one of its causes, is that of a connection to a JVM; not an exception of the JVM itself."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        is_of_py4j = type(link).__module__.startswith("py4j.") and type(link).__name__ != "Py4JJavaError"
        if is_of_py4j or isinstance(link, (ConnectionError, EOFError)):
            return True
        link = link.__cause__ or link.__context__
    return False


@contextmanager
def unless_jvm_ended() -> Iterator[None]:
    """Ignore the error if the connection to the JVM ends in the block: the job that needs the JVM raises one itself."""
    try:
        yield
    except Exception as error:
        if not is_of_connection(error):
            raise
