from __future__ import annotations

import pickle
import threading
import time
from pathlib import Path

import pytest

from cutline.fleet.cores import tasks_max
from cutline.fleet.units import Rate
from cutline.storage.local import LocalStore
from cutline.storage.location import StoreLocation
from cutline.storage.rate import CREDIT_SECONDS, PacedStore, RateLimit
from cutline.storage.store import ObjectStore, RequestStoppedError, stoppable_requests
from tests.stores.contract import ObjectStoreContract

MB = 1_000_000


class TestPacedStore(ObjectStoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> ObjectStore:
        return PacedStore(LocalStore(tmp_path / "paced"), RateLimit(1000 * MB))


def test_threads_share_a_pace() -> None:
    pace, began = RateLimit(10 * MB), time.monotonic()
    threads = [threading.Thread(target=pace.spend, args=(MB,)) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # 10 MB at 10 MB/s, without what the time before the first byte gave.
    assert time.monotonic() - began >= 0.9


def test_a_pause_is_not_made_up_for_without_a_bound() -> None:
    pace = RateLimit(MB)
    time.sleep(CREDIT_SECONDS + 0.5)
    began = time.monotonic()
    pace.spend(2 * MB)
    assert time.monotonic() - began >= 2 - CREDIT_SECONDS


def test_a_stopped_task_does_not_wait() -> None:
    began = time.monotonic()
    with stoppable_requests() as stop:
        threading.Timer(0.3, stop).start()
        with pytest.raises(RequestStoppedError):
            RateLimit(1000).spend(MB)
    assert time.monotonic() - began < 60


def test_tasks_in_other_processes_share_the_rate_of_the_store(tmp_path: Path) -> None:
    location = StoreLocation(f"file://{tmp_path}/store", bytes_per_second=8 * MB, tasks_max=4)
    # Tasks begin once the driver has reached the store.
    (tmp_path / "store").mkdir()
    sent = pickle.loads(pickle.dumps(location))
    assert sent.bytes_per_second == 2 * MB
    began = time.monotonic()
    for number in range(2):
        sent.open().create(f"object-{number}", bytes(2 * MB))
    assert time.monotonic() - began >= 1.9
    assert pickle.loads(pickle.dumps(StoreLocation("memory://none"))).bytes_per_second is None


@pytest.mark.parametrize(("text", "rate"), [("50MB/s", 50 * MB), ("16 MiB/s", 16 << 20), ("100kB/s", 100_000)])
def test_a_rate_is_a_size_per_second(text: str, rate: int) -> None:
    assert Rate.from_document(text) == rate


@pytest.mark.parametrize(("value", "problem"), [
    ("50MB", 'a rate is a string such as "50MB/s"'), (50, "a rate is a string"), ("/s", "is not a size"),
    ("99kB/s", "less than 100 kB/s"), ("0B/s", "less than 100 kB/s"),
])  # fmt: skip
def test_a_value_that_is_no_rate_is_refused(value: object, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Rate.from_document(value)


@pytest.mark.parametrize(("master", "settings", "tasks"), [
    ("local[3]", {}, 3), ("local", {}, 1), ("local-cluster[2,3,1024]", {}, 6), ("spark://m:7077", {}, None),
    ("spark://m:7077", {"spark.cores.max": "12"}, 12),
    ("k8s://https://m", {"spark.executor.instances": "5"}, 5),
    ("yarn", {"spark.executor.instances": "5", "spark.executor.cores": "4"}, 20),
    ("yarn", {"spark.dynamicAllocation.enabled": "true", "spark.executor.instances": "2"}, None),
    ("yarn", {"spark.dynamicAllocation.enabled": " True", "spark.executor.instances": "2"}, None),
    ("yarn", {"spark.dynamicAllocation.enabled": "true", "spark.dynamicAllocation.maxExecutors": "7"}, 7),
])  # fmt: skip
def test_the_most_tasks_at_once_follow_from_the_settings(
    master: str, settings: dict[str, str], tasks: int | None
) -> None:
    assert tasks_max(master, settings) == tasks
