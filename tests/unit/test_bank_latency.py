from __future__ import annotations

import threading

import pytest

from cutline.embedded.bank_workload import LatencyLog


def log_of(*entries: tuple[float, float]) -> LatencyLog:
    log = LatencyLog()
    for start, seconds in entries:
        log.add(start, seconds)
    return log


def test_an_empty_log_has_no_figures() -> None:
    assert LatencyLog().p99_seconds() is None
    assert LatencyLog().longest_between(0, 1) is None


def test_the_99th_percentile_is_exceeded_by_one_in_a_hundred() -> None:
    log = log_of(*((float(number), number / 1000) for number in range(1, 201)))
    assert log.p99_seconds() == pytest.approx(0.198)
    assert log_of((0.0, 0.5)).p99_seconds() == 0.5


def test_the_percentile_excludes_transactions_that_overlap_a_window() -> None:
    log = log_of((0.0, 0.1), (1.0, 5.0), (10.0, 0.2))
    assert log.p99_seconds() == 5.0
    assert log.p99_seconds(excluding=[(3.0, 4.0)]) == pytest.approx(0.2)
    assert log.p99_seconds(excluding=[(0.0, 20.0)]) is None


def test_the_longest_of_a_window_may_begin_before_it_or_end_after_it() -> None:
    log = log_of((0.0, 1.0), (2.0, 3.0), (6.0, 0.5))
    assert log.longest_between(0.5, 0.6) == 1.0
    assert log.longest_between(4.5, 6.1) == 3.0
    assert log.longest_between(5.5, 5.9) is None
    assert log.longest_between() == 3.0


def test_threads_lose_no_entry() -> None:
    log = LatencyLog()

    def add_many() -> None:
        for _ in range(1000):
            log.add(0.0, 1.0)

    threads = [threading.Thread(target=add_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(log) == len(log.entries()) == 4000
