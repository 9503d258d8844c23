"""What is not right with an executor is said in one line, by what it answers or by why it could not answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pyarrow
import pyspark
import pytest

from cutline.spark.late import check_worker
from cutline.spark.needs import (
    ExecutorNeeds,
    ExecutorTaskError,
    StoreNotSharedError,
    check_needs,
    find_executor_error,
    of_executor,
)
from cutline.spark.packing import build_digest
from cutline.spark.preflight import Examined, _none_hint, _problem_of
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation

# As Spark words them: cut from the errors of jobs on a standalone cluster.
LOST = "Lost task 0.3 in stage 0.0 (TID 7) (10.0.0.2 executor 1): "
RIGHT: dict[str, Any] = {
    "host": "w2", "process": 7, "python": "3.11.7", "lacks": "", "build": build_digest(), "problem": None, "key": "",
    "archive": "",
    "pyarrow": pyarrow.__version__, "pyspark": pyspark.__version__,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, None),
        ({"lacks": "pyarrow"}, "its Python 3.11.7 has no module pyarrow"),
        (
            {"archive": "http://m1:7/ab: timed out", "lacks": "pyarrow"},
            "it did not get the archive of Cutline: http://m1:7/ab: timed out",
        ),
        ({"build": "another"}, "it has a different build of Cutline"),
        ({"pyarrow": "1.0"}, f"its pyarrow is 1.0, but this machine's is {pyarrow.__version__}"),
        ({"pyspark": "3.5"}, f"its pyspark is 3.5, but this machine's is {pyspark.__version__}"),
        ({"time": 301.0}, "its clock is off by +301 s"),
        ({"time": -302.0}, "its clock is off by -302 s"),
        ({"time": 299.0}, None),
        ({"key": "probes/x/lost"}, "what it sees at {} is not this machine's store"),
        ({"key": "probes/x/stored"}, None),
    ],
)
def test_an_answer_is_compared_with_the_driver(tmp_path: Path, changed: dict[str, Any], said: str | None) -> None:
    store, now = LocalStore(tmp_path), time.time()
    store.create("probes/x/stored", b"probes/x/stored")
    answer = RIGHT | changed | {"time": now + changed.get("time", 0.0)}
    problem = _problem_of(Examined(answer, now, now), store)
    assert (problem and problem.message) == (said and said.format(store.url))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f'{LOST}java.io.IOException: Cannot run program "/opt/python": error=2, No such file or directory',
            "executor 1 on 10.0.0.2: it can't run /opt/python: No such file or directory",
        ),
        (
            f'{LOST}java.io.IOException: Cannot run program "/opt/python": Exec failed, error: 13 (Permission denied)',
            "executor 1 on 10.0.0.2: it can't run /opt/python: Permission denied",
        ),
        (
            f"{LOST}org.apache.spark.api.python.PythonException: … ModuleNotFoundError: No module named 'columns'",
            "executor 1 on 10.0.0.2: its Python has no module columns",
        ),
        (
            "PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has different version: 3.12 than"
            " that in driver: 3.11, PySpark cannot run with different minor versions.",
            "an executor: its Python is 3.12, but this machine's is 3.11",
        ),
        (f"{LOST}org.postgresql: FATAL:  out of memory", None),
    ],
)
def test_a_failed_job_tells_what_an_executor_lacks(text: str, said: str | None) -> None:
    found = find_executor_error(text)
    assert (found and found.message) == said


@pytest.mark.parametrize(
    "text",
    [
        "java.lang.OutOfMemoryError: Java heap space",
        "org.apache.spark.api.python.PythonException: pyarrow.lib.ArrowMemoryError: malloc of size 1 failed",
        "MemoryError",
        "OSError: [Errno 12] Cannot allocate memory",
        "RuntimeError: can't start new thread",
    ],
)
def test_an_executor_that_gets_no_more_memory_is_no_bug(text: str) -> None:
    found = find_executor_error(f"Job aborted:\n{LOST}{text}\n\tat org.apache.spark")
    assert found is not None
    assert (found.exit_code, found.slug) == (6, "too-little-memory")
    assert found.message == f"too little memory: executor 1 on 10.0.0.2: {text}"
    assert "executor.memory" in found.hint


def test_an_executor_without_room_for_a_process_is_no_lack_of_python() -> None:
    found = find_executor_error(f'{LOST}Cannot run program "/opt/python": Exec failed, error: 11 (Try again)')
    assert found is not None
    assert found.hint == "allow its user more processes (ulimit -u), or give its machine more memory"


def test_an_error_of_a_worker_crosses_with_its_class_and_the_executor() -> None:
    error = of_executor(StoreNotSharedError("file:///store"), "w2", 7)
    found = find_executor_error(f"{LOST}PythonException: {ExecutorTaskError(error)}\n\tat org.apache.spark")
    assert isinstance(found, StoreNotSharedError)
    assert found.message == "executor on w2 (process 7): what it sees at file:///store is not this machine's store"
    assert found.details == {"store": "file:///store", "host": "w2", "process": 7}


def test_a_worker_refuses_another_build_and_another_store(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.create("fleet.json", b"ours")
    needs = ExecutorNeeds(StoreLocation(store.url), key="fleet.json", body=b"ours")
    check_worker(build_digest(), needs)
    with pytest.raises(ExecutorTaskError, match="different build"):
        check_worker("another", needs)
    with pytest.raises(ExecutorTaskError, match="is not this machine's store"):
        check_worker(build_digest(), ExecutorNeeds(StoreLocation(store.url), key="fleet.json", body=b"theirs"))


@pytest.mark.parametrize(("body", "slug"), [(b"ours", None), (b"theirs", "store-not-shared")])
def test_who_only_reads_is_asked_for_what_the_driver_has_read(tmp_path: Path, body: bytes, slug: str | None) -> None:
    store = LocalStore(tmp_path)
    store.create("fleet.json", body)
    problem, key = check_needs(ExecutorNeeds(StoreLocation(store.url), key="fleet.json", body=b"ours"))
    assert (problem and problem["slug"], key) == (slug, "")
    assert store.list("") == ["fleet.json"]


@pytest.mark.parametrize(
    ("master", "said"),
    [("k8s://https://x", "kubectl get pods -l spark-role=executor"), ("spark://m:7077", "its workers")],
)
def test_the_hint_of_a_cluster_without_executors_says_where_to_look(master: str, said: str) -> None:
    assert said in _none_hint(master)
