"""A thread that dies before it runs, or before it has done its work, is waited for by nobody."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import cutline.nodes.daemon_threads as daemon_threads
import cutline.spark.start as spark
import cutline.storage.process_limits as module
import cutline.storage.s3_client as s3_client
import cutline.wal.drain.message_stream as overlap
from cutline.cli.output.failure import failure_of
from cutline.nodes.daemon_threads import await_futures, start_daemons
from cutline.storage.memory import InMemoryStore
from cutline.storage.probe import probe_race
from cutline.storage.process_limits import TooLittleMemoryError, lacks_memory

SECONDS_MAX = 60

# The process gets no more memory; a thread has ended, whose stack the next one can have.
WITHOUT_MEMORY = """
import os, resource, threading
from pathlib import Path
import cutline.storage.process_limits as module

module.BEGIN_SECONDS_MAX = 1
module.limit_thread_starts()
first, *others = [threading.Thread(target=int) for _ in range(5)]
first.start()
while len(os.listdir("/proc/self/task")) > 1:
    pass
size_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
unlimited = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size_bytes, unlimited[1]))
ended = 0
for thread in others:
    try:
        thread.start()
    except (RuntimeError, MemoryError):
        ended += 1
resource.setrlimit(resource.RLIMIT_AS, unlimited)
print("ended", ended)
"""


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of this process have a second to begin."""
    monkeypatch.setattr(module, "BEGIN_SECONDS_MAX", 1)
    # It is put back.
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    module.limit_thread_starts()


class Dying(threading.Thread):
    """Dies before it says that it has begun."""

    def _bootstrap(self) -> None:
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="other systems don't limit the address space")
def test_a_start_ends_in_a_process_that_gets_no_more_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_MEMORY], capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ended 4\n"), done


@pytest.mark.usefixtures("limited")
def test_a_thread_that_does_not_begin_is_no_more_waited_for_and_lacks_memory() -> None:
    with pytest.raises(RuntimeError, match="can't start new thread") as raised:
        Dying().start()
    assert lacks_memory(raised.value)
    assert failure_of(raised.value).slug == "too-little-memory"


@pytest.mark.usefixtures("limited")
def test_threads_start_as_before() -> None:
    done = threading.Event()
    thread = threading.Thread(target=done.set)
    thread.start()
    thread.join()
    assert done.is_set()
    with pytest.raises(RuntimeError, match="once"):
        thread.start()
    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(abs, [-1, 2])) == [1, 2]


@pytest.mark.usefixtures("limited")
def test_a_start_of_spark_whose_library_can_not_start_a_thread_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark.SparkStart, "_build", lambda _: Dying().start())
    with spark.SparkStart("local[1]", {}, "test") as start, pytest.raises(TooLittleMemoryError) as raised:
        start.session()
    assert failure_of(raised.value).code == 6


@pytest.mark.parametrize("error", [None, MemoryError()], ids=["without a word", "without memory"])
def test_a_start_of_spark_whose_thread_has_died_ends(error: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(start: Any) -> None:
        start._error = error

    monkeypatch.setattr(spark, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(spark.SparkStart, "_start", die)
    start = spark.SparkStart("local[1]", {}, "test")
    with pytest.raises((TooLittleMemoryError, MemoryError)) as raised:
        start.session()
    assert failure_of(raised.value).slug == "too-little-memory"
    start._is_over.set()
    start.stop()


def test_sessions_whose_threads_have_died_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_threads, "LOOK_SECONDS", 0.05)
    set_one, never = Future[None](), Future[None]()
    with pytest.raises(TooLittleMemoryError):
        await_futures([set_one, never], start_daemons(set_one.set_result, deque([None]), "test"))
    await_futures([set_one], [])


def test_what_is_read_ahead_is_used_and_the_death_of_its_thread_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def die(ahead: Any) -> None:
        ahead._ready.put(1)
        ahead._ready.put("batch")

    monkeypatch.setattr(overlap, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(overlap._Ahead, "_run", die)
    with overlap.read_ahead(lambda: iter(())) as batches:  # type: ignore[arg-type,return-value]
        assert next(batches) == "batch"
        with pytest.raises(TooLittleMemoryError):
            next(batches)


def test_a_request_to_a_store_whose_thread_has_died_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, "SIGNAL_SECONDS_MAX", 0.01)
    monkeypatch.setattr(s3_client, "CLEAN_UP_SECONDS_MAX", 0.01)
    loop = asyncio.new_event_loop()
    client: Any = SimpleNamespace(loop=loop)
    with pytest.raises(TooLittleMemoryError):
        s3_client.wait_for(client, asyncio.sleep(0))
    # What was asked of it is forgotten without a warning.
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()


def test_a_race_without_a_thread_for_each_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(thread: threading.Thread) -> None:
        if started:
            raise RuntimeError(module.NO_THREAD)
        started.append(thread)
        begin(thread)

    begin = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    store = InMemoryStore("memory://a")
    with pytest.raises(RuntimeError, match="new thread"):
        probe_race(store, "race", store.create, "create")
