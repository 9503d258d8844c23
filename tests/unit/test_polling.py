"""Threads count a job's progress and its executors. If the JVM has ended, the job says so, and they print nothing."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from py4j.protocol import Py4JError, Py4JNetworkError

from cutline.fleet.progress import Silent
from cutline.spark import preflight, spark_jobs
from cutline.spark.preflight import awaiting_executors
from cutline.spark.spark_jobs import polling

COUNTED_SECONDS_MAX = 20.0


def problems_of_thread(monkeypatch: pytest.MonkeyPatch, error: Exception, times: int) -> list[Any]:
    """The exceptions that the thread does not handle if counting fails with `error`, until it was tried so often."""
    counted, found = threading.Semaphore(0), list[Any]()

    def count() -> None:
        counted.release()
        raise error

    monkeypatch.setattr(spark_jobs, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    with polling(count):
        for _ in range(times):
            assert counted.acquire(timeout=COUNTED_SECONDS_MAX)
    return found


@pytest.mark.parametrize("error", [Py4JError("gone"), Py4JNetworkError("gone"), ConnectionResetError()])
def test_counting_goes_on_if_the_jvm_does_not_answer(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    assert problems_of_thread(monkeypatch, error, times=2) == []


def test_another_error_of_counting_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RuntimeError("a bug")
    assert problems_of_thread(monkeypatch, error, times=1) == [error]


@pytest.mark.parametrize(("error", "is_hidden"), [(Py4JNetworkError("gone"), True), (RuntimeError("a bug"), False)])
def test_the_search_for_executors_ends_quietly_with_the_jvm(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    is_hidden: bool,  # noqa: FBT001  # a parameter of the case
) -> None:
    asked, found = threading.Event(), list[Any]()

    def count(_: object) -> int:
        asked.set()
        raise error

    monkeypatch.setattr(preflight, "POLL_SECONDS", 0.001)
    monkeypatch.setattr(preflight, "count_executors", count)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: found.append(arguments.exc_value))
    # What of a session is read before it is asked for its executors.
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(master="spark://m:7077"))
    with awaiting_executors(session, 60.0, Silent()):
        assert asked.wait(COUNTED_SECONDS_MAX)
    assert found == ([] if is_hidden else [error])
