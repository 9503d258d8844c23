"""When the tasks of `watch` are due: by arithmetic on times that are chosen here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cutline.cli.watch.schedule import FullPauses, Task, TaskKind, next_task
from cutline.fleet.units import Interval

NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)
MINUTE = timedelta(minutes=1)


def task(kind: TaskKind = TaskKind.INCREMENT, seconds: float = 300.0, done_at: datetime | None = None) -> Task:
    return Task(kind, seconds, done_at)


def test_a_task_is_due_an_interval_after_it_was_done() -> None:
    assert task(done_at=NOON).due_at(NOON, NOON) == NOON + 5 * MINUTE


def test_what_was_never_done_is_due_at_once_and_what_is_never_to_be_done_is_not() -> None:
    assert task().due_at(NOON, NOON) == NOON
    assert task(seconds=0).due_at(NOON, NOON) is None


def test_a_time_that_was_missed_often_is_made_up_once() -> None:
    late = NOON + timedelta(days=3)
    found, _ = next_task({TaskKind.INCREMENT: task(done_at=NOON)}, NOON, late)
    assert found is not None
    assert next_task({TaskKind.INCREMENT: found.done(late)}, NOON, late) == (None, late + 5 * MINUTE)


def test_each_failure_waits_twice_as_long_as_the_one_before_up_to_the_interval() -> None:
    found, waits = task(done_at=NOON), []
    for _ in range(9):
        found = found.failed(NOON, "away")
        assert found.retry_at is not None
        waits.append((found.retry_at - NOON).total_seconds())
    assert waits == [5, 10, 20, 40, 80, 160, 300, 300, 300]
    assert (found.failures, found.failing_since, found.problem) == (9, NOON, "away")


def test_a_clock_that_was_ahead_makes_nobody_wait_for_more_than_an_interval() -> None:
    for year in (2027, 9999):
        assert task(done_at=NOON.replace(year=year)).due_at(NOON, NOON) == NOON + 5 * MINUTE
    ahead = task(done_at=NOON).failed(NOON.replace(year=2027), "away")
    assert ahead.due_at(NOON, NOON) == NOON + 10 * MINUTE


def test_a_task_may_fail_for_months() -> None:
    found = task()
    for _ in range(5000):
        found = found.failed(NOON, "away")
    assert found.retry_at == NOON + 5 * MINUTE


def test_full_snapshots_follow_ever_more_slowly_while_chains_end_young() -> None:
    pauses = FullPauses()
    assert [pauses.next_seconds(str(number), 600) for number in range(9)] == [
        0,
        60,
        120,
        240,
        480,
        960,
        1920,
        3600,
        3600,
    ]
    assert [pauses.next_seconds("8", 600), pauses.next_seconds("9", 86400)] == [3600, 0]
    assert [pauses.next_seconds("10", 600), pauses.next_seconds("11", 600), pauses.next_seconds("11", 600)] == [
        0,
        60,
        60,
    ]
    assert pauses.next_seconds("", None) == 0


def test_no_attempt_waits_longer_than_ten_minutes() -> None:
    found = task(TaskKind.FULL, 7 * 86400.0)
    for _ in range(20):
        found = found.failed(NOON, "away")
    assert found.retry_at == NOON + 10 * MINUTE


def test_a_success_ends_the_failures() -> None:
    done = task(done_at=NOON).failed(NOON, "away").done(NOON + MINUTE)
    assert (done.failures, done.problem, done.due_at(NOON, NOON + MINUTE)) == (0, "", NOON + 6 * MINUTE)


def test_a_task_that_is_put_off_has_not_failed() -> None:
    found = task(done_at=NOON).put_off(NOON, 15)
    assert (found.failures, found.due_at(NOON, NOON)) == (0, NOON + timedelta(seconds=15))


def test_of_several_tasks_the_full_snapshot_is_first_and_the_rest_in_order() -> None:
    tasks = {kind: task(kind) for kind in reversed(TaskKind)}
    order = []
    for _ in TaskKind:
        found, _ = next_task(tasks, NOON, NOON)
        assert found is not None
        order.append(found.kind)
        tasks[found.kind] = found.done(NOON)
    assert order == list(TaskKind)
    assert next_task(tasks, NOON, NOON) == (None, NOON + 5 * MINUTE)


@pytest.mark.parametrize(
    ("text", "seconds"), [("never", 0), ("hourly", 3600), ("weekly", 604800), ("5min", 300), ("1.5d", 129600)]
)
def test_an_interval_is_a_word_or_a_length_of_time(text: str, seconds: float) -> None:
    assert Interval.parse(text) == seconds


@pytest.mark.parametrize("text", ["often", "5", "-5min", ""])
def test_nothing_else_is_an_interval(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        Interval.parse(text)


def test_increments_that_take_longer_than_their_interval_keep_nothing_else_waiting() -> None:
    seconds = {TaskKind.INCREMENT: 10.0, TaskKind.PRUNE: 600.0, TaskKind.CHECK: 600.0}
    tasks, now, counts = {kind: Task(kind, one, NOON) for kind, one in seconds.items()}, NOON, dict.fromkeys(seconds, 0)
    while now < NOON + 60 * MINUTE:
        found, next_at = next_task(tasks, NOON, now)
        if found is None:
            assert next_at is not None
            now = next_at
            continue
        counts[found.kind] += 1
        # An interval counts from the cut.
        cut_at, now = now + timedelta(seconds=1), now + timedelta(seconds=12)
        tasks[found.kind] = found.done(cut_at if found.kind is TaskKind.INCREMENT else now)
    # Every ten minutes and some twelve seconds, and an increment in every twelve seconds that are left of the hour.
    assert (counts[TaskKind.PRUNE], counts[TaskKind.CHECK]) == (5, 5)
    assert counts[TaskKind.INCREMENT] >= (3600 - 10 - 10 * 12) // 12


def test_what_the_store_tells_ends_no_failure() -> None:
    told = task(done_at=NOON).failed(NOON, "away").last_done(NOON + MINUTE)
    assert (told.failing_since, told.problem, told.failures) == (NOON, "away", 0)
    assert told.due_at(NOON, NOON + MINUTE) == NOON + 6 * MINUTE
