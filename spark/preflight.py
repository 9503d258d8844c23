"""Test every executor for the needs of the command's tasks, before anything is created on a node or in the store.

The driver compares the answers here. Every problem is reported with the executor's name.

If no executor is granted, the error lists the free resources of a standalone master's workers, as Spark's web page
does. The master is asked in its own protocol, which PySpark does not expose.
"""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as AnswerTimeoutError
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from cutline.fleet.config import has_executors
from cutline.fleet.messages import list_some
from cutline.fleet.progress import News, Progress
from cutline.spark.late import INSTALL
from cutline.spark.needs import (
    WAIT_SECONDS,
    ExecutorNeeds,
    ExecutorUnfitError,
    StoreNotSharedError,
    of_executor,
    raising_executor_errors,
    unless_jvm_ended,
)
from cutline.spark.packing import build_digest
from cutline.storage.clock import utc_now
from cutline.storage.errors import SnapshotError, UnreachableError, error_of
from cutline.storage.ids import new_operation_id
from cutline.storage.probe import PROBES
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.own_store import FLEET_KEY

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ANSWER_SECONDS_MAX = 5.0
NAMED_MAX = 3
DEPLOY = "org.apache.spark.deploy.DeployMessages$"


def read_offer(session: SparkSession) -> str:
    """Describe the free resources of a standalone master's workers, as the end of a sentence; "" if unknown."""
    master = str(session.sparkContext.master)
    if not master.startswith("spark://"):
        return ""
    # Spark keeps asking an unresponsive master for two minutes.
    threads = ThreadPoolExecutor(max_workers=1)
    try:
        return threads.submit(_read, session, master).result(ANSWER_SECONDS_MAX)
    except (AnswerTimeoutError, Exception):  # noqa: BLE001  # other versions of Spark may lack this message
        return ""
    finally:
        threads.shutdown(wait=False)


def _read(session: SparkSession, master: str) -> str:
    jvm = session.sparkContext._jvm
    if jvm is None:
        return ""
    reflected = jvm.java.lang.Class
    # Use the field, because py4j can't list the methods: one of them has a type that is not on the class path.
    field = reflected.forName("org.apache.spark.SparkEnv").getDeclaredField("rpcEnv")
    field.setAccessible(True)
    address = jvm.org.apache.spark.rpc.RpcAddress.fromSparkURL(master)
    endpoint = field.get(session._jsc.sc().env()).setupEndpointRef(address, "Master")
    question = reflected.forName(f"{DEPLOY}RequestMasterState$").getField("MODULE$").get(None)
    answer = jvm.scala.reflect.ClassTag.apply(reflected.forName(f"{DEPLOY}MasterStateResponse"))
    workers = [worker for worker in endpoint.askSync(question, answer).workers() if str(worker.state()) == "ALIVE"]
    if not workers:
        return "it has no workers"
    return f"free on its workers: {list_some([_free(worker) for worker in workers], NAMED_MAX)}"


def _free(worker: Any) -> str:
    return (
        f"{worker.coresFree()} of {worker.cores()} cores and {worker.memoryFree()} of {worker.memory()} MiB"
        f" on {worker.host()}"
    )


# Executors that are added while others are answering are asked in a later round.
ROUNDS_MAX = 3
POLL_SECONDS = 0.5
# The setting for the number of seconds that later jobs in the session wait for an executor.
WAIT_SETTING = "cutline.wait.seconds"
NAMED_SECONDS = 30.0
# S3 refuses requests whose signing time is off by a quarter of an hour.
CLOCK_SECONDS_MAX = 300.0
ARCHIVE_HINT = (
    "make sure that executors can reach this command at driver.host and cutline.archive.port of [spark], and that their"
    " user's cache folder has 1 GB of free space: docs/cluster.md"
)


class NoExecutorError(UnreachableError):
    """The cluster's master has not granted any executors."""


class Examined(Struct, frozen=True):
    """An executor's answer, and the times when the driver asked for it and received it, in seconds since 1970."""

    found: Mapping[str, Any]
    asked_at: float
    answered_at: float


def check_executors(session: SparkSession, needs: ExecutorNeeds, progress: Progress) -> ExecutorNeeds:
    """Wait for an executor, raise the error of any executor that can't take part, and return the completed needs.

    Raises NoExecutorError, ExecutorUnfitError, StoreNotSharedError, or the error that an executor got from the store or
    a node.
    """
    progress.step("check executors")
    store = needs.store.open()
    with _probing(store, needs) as complete:
        answers = _ask(session, complete, progress)
        problems = [
            of_executor(problem, *place)
            for place, examined in answers.items()
            if (problem := _problem_of(examined, store))
        ]
    if problems:
        raise _combine(problems, len(answers))
    session.conf.set(WAIT_SETTING, str(needs.wait_seconds))
    # Executors that are added later only read the store's fleet file. Their needs are sent with every task, so they
    # don't contain node passwords.
    return replace(needs, nodes=(), key=FLEET_KEY, body=store.read(FLEET_KEY))


@contextmanager
def _probing(store: ObjectStore, needs: ExecutorNeeds) -> Iterator[ExecutorNeeds]:
    """Complete the needs with an object that the driver stores or, if tasks don't write, reads."""
    if not needs.writes:
        yield replace(needs, key=FLEET_KEY, body=store.read(FLEET_KEY))
        return
    folder, body = f"{PROBES}/{new_operation_id(utc_now())}", uuid.uuid4().bytes
    try:
        create_or_find(store, f"{folder}/driver", body)
        yield replace(needs, key=f"{folder}/driver", body=body, folder=folder)
    finally:
        # If the store forbids deleting, the objects stay, as after `init`.
        with suppress(SnapshotError):
            for key in store.list(folder):
                store.delete(key)


def _ask(session: SparkSession, needs: ExecutorNeeds, progress: Progress) -> dict[tuple[str, int], Examined]:
    from pyspark import cloudpickle

    from cutline.spark import examine

    cloudpickle.register_pickle_by_value(examine)  # type: ignore[no-untyped-call]  # pyspark's own
    work = partial(examine.examine, build_digest(), pickle.dumps(needs))
    answers: dict[tuple[str, int], Examined] = {}
    for _ in range(ROUNDS_MAX):
        asked_at = utc_now().timestamp()
        with awaiting_executors(session, needs.wait_seconds, progress), raising_executor_errors():
            # Run as many tasks as fit at once: every idle executor gets a task before a busy executor gets its second.
            count = max(session.sparkContext.defaultParallelism, 2)
            found = session.sparkContext.parallelize(range(count), count).map(work).collect()
        for answer in found:
            answers.setdefault((answer["host"], answer["process"]), Examined(answer, asked_at, utc_now().timestamp()))
        if len(answers) >= count_executors(session):
            break
    return answers


def count_executors(session: SparkSession) -> int:
    """Count the executors that the session has now."""
    # Spark's map includes the driver.
    return int(session._jsc.sc().getExecutorMemoryStatus().size()) - 1  # pyspark has no other way


@contextmanager
def awaiting_executors(session: SparkSession, wait_seconds: float | None, progress: Progress) -> Iterator[None]:
    """If there is no executor for `wait_seconds`, cancel the job in the block and raise NoExecutorError.

    If `wait_seconds` is None, it is the time of the ExecutorNeeds with which the executors were checked.
    After NAMED_SECONDS without an executor a note says so. With a local master, where the driver runs the tasks, this
    does nothing.
    """
    if not has_executors(str(session.sparkContext.master)):
        yield
        return
    if wait_seconds is None:
        wait_seconds = float(session.conf.get(WAIT_SETTING, str(WAIT_SECONDS)) or 0)
    ended, gave_up = threading.Event(), threading.Event()

    @unless_jvm_ended()
    def watch() -> None:
        since, is_noted = time.monotonic(), False
        while not ended.wait(POLL_SECONDS):
            if count_executors(session) > 0:
                since, is_noted = time.monotonic(), False
                continue
            waited = time.monotonic() - since
            if waited >= wait_seconds:
                gave_up.set()
                session.sparkContext.cancelAllJobs()
                return
            if waited >= NAMED_SECONDS and not is_noted:
                progress.note(News(f"{_none_text(session)}{_offer(session)}; waiting for up to {wait_seconds:.0f} s"))
                is_noted = True

    thread = threading.Thread(target=watch, name="executors", daemon=True)
    thread.start()
    try:
        yield
    except Exception as error:
        if not gave_up.is_set():
            raise
        raise NoExecutorError(
            f"{_none_text(session)} in {wait_seconds:.0f} s{_offer(session)}",
            hint=_none_hint(str(session.sparkContext.master)),
            details={"master": session.sparkContext.master},
        ) from error
    finally:
        ended.set()
        thread.join()


def _none_text(session: SparkSession) -> str:
    conf, master = session.sparkContext.getConf(), str(session.sparkContext.master)
    # By default a standalone cluster gives an executor all of a worker's cores; other clusters give it one.
    usual = "all" if master.startswith("spark://") else "1"
    cores, memory = conf.get("spark.executor.cores", usual), conf.get("spark.executor.memory", "1g")
    return f"{master} has not granted any executor with {memory} memory and {cores} cores"


def _offer(session: SparkSession) -> str:
    offer = read_offer(session)
    return f"; {offer}" if offer else ""


def _none_hint(master: str) -> str:
    if master.startswith("k8s://"):
        return (
            "look at its executors' pods while the command waits: kubectl get pods -l spark-role=executor; and check"
            " that they can reach driver.host: docs/kubernetes.md"
        )
    return "check that its workers are running and have the memory and cores that [spark] of fleet.toml requests"


def _problem_of(answer: Examined, store: ObjectStore) -> SnapshotError | None:
    import pyarrow
    import pyspark

    found = answer.found
    if found["archive"]:
        return ExecutorUnfitError(f"it did not get the archive of Cutline: {found['archive']}", hint=ARCHIVE_HINT)
    if found["lacks"]:
        return ExecutorUnfitError(f"its Python {found['python']} has no module {found['lacks']}", hint=INSTALL)
    if found["build"] != build_digest():
        return ExecutorUnfitError("it has a different build of Cutline", hint=INSTALL)
    for library, version in (("pyspark", pyspark.__version__), ("pyarrow", pyarrow.__version__)):
        if found[library] != version:
            return ExecutorUnfitError(
                f"its {library} is {found[library]}, but this machine's is {version}", hint=INSTALL
            )
    early, late = answer.asked_at - CLOCK_SECONDS_MAX, answer.answered_at + CLOCK_SECONDS_MAX
    if not early < found["time"] < late:
        off = found["time"] - answer.answered_at
        return ExecutorUnfitError(
            f"its clock is off by {off:+.0f} s", hint="synchronize the clocks of all machines with NTP"
        )
    if found["problem"] is not None:
        return error_of(found["problem"])
    return None if not found["key"] or _has_answer(store, found["key"]) else StoreNotSharedError(store.url)


def _has_answer(store: ObjectStore, key: str) -> bool:
    try:
        return store.read(key) == key.encode()
    except ObjectMissingError:
        return False


def _combine(problems: Sequence[SnapshotError], asked: int) -> SnapshotError:
    first, others = problems[0], problems[1:]
    if others:
        first.details["others"] = [error.message for error in others]
        messages = "; ".join(problem.message for problem in problems)
        kind = type(first)
        combined = kind.__new__(kind)
        SnapshotError.__init__(
            combined,
            f"{len(problems)} of {asked} executors can't be used: {messages}",
            hint=list(dict.fromkeys(line for problem in problems for line in problem.hint.split("\n"))),
            details=first.details,
        )
        return combined
    return first
