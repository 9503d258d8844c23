"""Before anything is made on a node or in the store, test every executor for the needs of the command's tasks.

The answers are compared here, by the driver. Every problem is reported with the executor's name.

Where executors are lacking, the error says what the master's workers have free. Spark's web page shows it; here another
message of the master's protocol asks for it, which has no place in PySpark.
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
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from cutline.fleet.config import has_executors
from cutline.fleet.messages import list_some
from cutline.fleet.progress import News, Progress
from cutline.spark.late import INSTALL
from cutline.spark.needs import (
    ExecutorNeeds,
    ExecutorUnfitError,
    StoreNotSharedError,
    of_executor,
    raising_executor_errors,
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
    """The free resources of a standalone master's workers, as the end of a sentence; "" if they can't be known."""
    master = str(session.sparkContext.master)
    if not master.startswith("spark://"):
        return ""
    # A master that does not answer is asked for two minutes.
    threads = ThreadPoolExecutor(max_workers=1)
    try:
        return threads.submit(_read, session, master).result(ANSWER_SECONDS_MAX)
    except (AnswerTimeoutError, Exception):  # noqa: BLE001  # another version of Spark may not have this message
        return ""
    finally:
        threads.shutdown(wait=False)


def _read(session: SparkSession, master: str) -> str:
    jvm = session.sparkContext._jvm
    if jvm is None:
        return ""
    reflected = jvm.java.lang.Class
    # Its methods can't be listed: one has a type that is not on the class path.
    field = reflected.forName("org.apache.spark.SparkEnv").getDeclaredField("rpcEnv")
    field.setAccessible(True)
    address = jvm.org.apache.spark.rpc.RpcAddress.fromSparkURL(master)
    endpoint = field.get(session._jsc.sc().env()).setupEndpointRef(address, "Master")
    question = reflected.forName(f"{DEPLOY}RequestMasterState$").getField("MODULE$").get(None)
    answer = jvm.scala.reflect.ClassTag.apply(reflected.forName(f"{DEPLOY}MasterStateResponse"))
    workers = [worker for worker in endpoint.askSync(question, answer).workers() if str(worker.state()) == "ALIVE"]
    if not workers:
        return "it has no worker"
    return f"free on its workers: {list_some([_free(worker) for worker in workers], NAMED_MAX)}"


def _free(worker: Any) -> str:
    return (
        f"{worker.coresFree()} of {worker.cores()} cores and {worker.memoryFree()} of {worker.memory()} MiB"
        f" on {worker.host()}"
    )


# Executors that come while the others answer are asked too.
ROUNDS_MAX = 3
POLL_SECONDS = 0.5
# The seconds for which later jobs of the session wait for an executor.
WAIT_SETTING = "cutline.wait.seconds"
NAMED_SECONDS = 30.0
# S3 refuses requests that are signed a quarter of an hour earlier or later.
CLOCK_SECONDS_MAX = 300.0
ARCHIVE_HINT = (
    "make sure that executors can reach this command at driver.host and cutline.archive.port of [spark], and that their"
    " user has a cache folder with 1 GB free: docs/cluster.md"
)


class NoExecutorError(UnreachableError):
    """The cluster's master grants no executor."""


@dataclass(frozen=True, slots=True)
class Examined:
    """An executor's answer, and when the driver had asked for it and got it (seconds since the epoch)."""

    found: Mapping[str, Any]
    asked_at: float
    answered_at: float


def check_executors(session: SparkSession, needs: ExecutorNeeds, progress: Progress) -> ExecutorNeeds:
    """Wait for an executor, and raise the error of those that can't take part; return the completed needs.

    Raises NoExecutorError, ExecutorUnfitError, StoreNotSharedError, or an executor's error at the store or a node.
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
    # Later executors read only the fleet's file: these needs are sent with every task, without any node's password.
    return replace(needs, nodes=(), key=FLEET_KEY, body=store.read(FLEET_KEY))


@contextmanager
def _probing(store: ObjectStore, needs: ExecutorNeeds) -> Iterator[ExecutorNeeds]:
    """The needs with an object that the driver has stored if tasks write, else with an object that it has read."""
    if not needs.writes:
        yield replace(needs, key=FLEET_KEY, body=store.read(FLEET_KEY))
        return
    folder, body = f"{PROBES}/{new_operation_id(utc_now())}", uuid.uuid4().bytes
    try:
        create_or_find(store, f"{folder}/driver", body)
        yield replace(needs, key=f"{folder}/driver", body=body, folder=folder)
    finally:
        # An object that may not be deleted stays, as after `init`.
        with suppress(SnapshotError):
            for key in store.list(folder):
                store.delete(key)


def _ask(session: SparkSession, needs: ExecutorNeeds, progress: Progress) -> dict[tuple[str, int], Examined]:
    """The answers by host and process."""
    from pyspark import cloudpickle

    from cutline.spark import examine

    cloudpickle.register_pickle_by_value(examine)  # type: ignore[no-untyped-call]  # pyspark's own
    work = partial(examine.examine, build_digest(), pickle.dumps(needs))
    answers: dict[tuple[str, int], Examined] = {}
    for _ in range(ROUNDS_MAX):
        asked_at = utc_now().timestamp()
        with awaiting_executors(session, needs.wait_seconds, progress), raising_executor_errors():
            # As many as run at once: an idle executor gets one before a busy one gets a second.
            count = max(session.sparkContext.defaultParallelism, 2)
            found = session.sparkContext.parallelize(range(count), count).map(work).collect()
        for answer in found:
            answers.setdefault((answer["host"], answer["process"]), Examined(answer, asked_at, utc_now().timestamp()))
        if len(answers) >= count_executors(session):
            break
    return answers


def count_executors(session: SparkSession) -> int:
    """How many executors the session has now."""
    # The driver is one of them.
    return int(session._jsc.sc().getExecutorMemoryStatus().size()) - 1  # pyspark has no other way


@contextmanager
def awaiting_executors(session: SparkSession, wait_seconds: float, progress: Progress) -> Iterator[None]:
    """While the block runs a job, cancel it if there is no executor for `wait_seconds`: raise NoExecutorError.

    Notes after NAMED_SECONDS that there is none. With a local master the driver runs the tasks.
    """
    if not has_executors(str(session.sparkContext.master)):
        yield
        return
    ended, gave_up = threading.Event(), threading.Event()

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
    # A standalone cluster gives an executor all cores of a worker unless it is told otherwise; others one.
    usual = "all" if master.startswith("spark://") else "1"
    cores, memory = conf.get("spark.executor.cores", usual), conf.get("spark.executor.memory", "1g")
    return f"{master} has granted no executor of {memory} memory and {cores} cores"


def _offer(session: SparkSession) -> str:
    offer = read_offer(session)
    return f"; {offer}" if offer else ""


def _none_hint(master: str) -> str:
    if master.startswith("k8s://"):
        return (
            "see what becomes of its executors' pods, while the command waits: kubectl get pods -l spark-role=executor;"
            " and that they reach driver.host: docs/kubernetes.md"
        )
    return "see that its workers run, and have the memory and cores that [spark] of fleet.toml asks for"


def _problem_of(answer: Examined, store: ObjectStore) -> SnapshotError | None:
    """The first thing that is not right with an executor."""
    import pyarrow
    import pyspark

    found = answer.found
    if found["archive"]:
        return ExecutorUnfitError(f"it has no archive of Cutline: {found['archive']}", hint=ARCHIVE_HINT)
    if found["lacks"]:
        return ExecutorUnfitError(f"its Python {found['python']} has no module {found['lacks']}", hint=INSTALL)
    if found["build"] != build_digest():
        return ExecutorUnfitError("it has another build of Cutline", hint=INSTALL)
    for library, version in (("pyspark", pyspark.__version__), ("pyarrow", pyarrow.__version__)):
        if found[library] != version:
            return ExecutorUnfitError(f"its {library} is {found[library]}, here it is {version}", hint=INSTALL)
    early, late = answer.asked_at - CLOCK_SECONDS_MAX, answer.answered_at + CLOCK_SECONDS_MAX
    if not early < found["time"] < late:
        off = found["time"] - answer.answered_at
        return ExecutorUnfitError(f"its clock is off by {off:+.0f} s", hint="set the clocks of all machines by NTP")
    if found["problem"] is not None:
        return error_of(found["problem"])
    return None if not found["key"] or _has_answer(store, found["key"]) else StoreNotSharedError(store.url)


def _has_answer(store: ObjectStore, key: str) -> bool:
    """Whether the store has the object that an executor stored under `key`."""
    try:
        return store.read(key) == key.encode()
    except ObjectMissingError:
        return False


def _combine(problems: Sequence[SnapshotError], asked: int) -> SnapshotError:
    """The first error, with the messages of the others, and how many executors are right."""
    first, others = problems[0], problems[1:]
    if others:
        first.details["others"] = [error.message for error in others]
        messages = "; ".join(problem.message for problem in problems)
        kind = type(first)
        combined = kind.__new__(kind)
        SnapshotError.__init__(
            combined,
            f"{len(problems)} of {asked} executors can't take part: {messages}",
            hint=list(dict.fromkeys(line for problem in problems for line in problem.hint.split("\n"))),
            details=first.details,
        )
        return combined
    return first
