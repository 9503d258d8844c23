from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from cutline.cli.watch.schedule import Task, TaskKind, hours_texts, next_task
from cutline.fleet.hours import Hours

NIGHT, NOON = Hours.parse("22:00-06:00"), Hours.parse("11:30-13:00")
BERLIN = Hours.parse("22:00-06:00 Europe/Berlin")
DAY = 86400.0


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.parametrize(("hours", "moment", "opens"), [
    (NIGHT, "2026-11-29 21:59:59", "2026-11-29 22:00"),
    (NIGHT, "2026-11-29 22:00", "2026-11-29 22:00"),
    (NIGHT, "2026-11-30 00:00", "2026-11-30 00:00"),
    (NIGHT, "2026-11-30 05:59:59", "2026-11-30 05:59:59"),
    (NIGHT, "2026-11-30 06:00", "2026-11-30 22:00"),
    (NOON, "2026-12-31 13:00", "2027-01-01 11:30"),
    (NOON, "2026-12-31 12:59", "2026-12-31 12:59"),
    # Berlin: UTC+1 in winter, UTC+2 in summer.
    (BERLIN, "2026-11-29 20:59", "2026-11-29 21:00"),
    (BERLIN, "2026-07-01 19:59", "2026-07-01 20:00"),
    (BERLIN, "2026-07-01 04:00", "2026-07-01 20:00"),
    (BERLIN, "2026-11-29 04:59", "2026-11-29 04:59"),
    # The night when clocks go forward is an hour shorter: 21:00 to 04:00 UTC.
    (BERLIN, "2026-03-29 03:59", "2026-03-29 03:59"),
    (BERLIN, "2026-03-29 04:00", "2026-03-29 20:00"),
    # The night when they go back is an hour longer: 20:00 to 05:00 UTC.
    (BERLIN, "2026-10-24 19:59", "2026-10-24 20:00"),
    (BERLIN, "2026-10-25 04:59", "2026-10-25 04:59"),
    (BERLIN, "2026-10-25 05:00", "2026-10-25 21:00"),
])  # fmt: skip
def test_a_window_opens_by_the_clocks_of_its_zone(hours: Hours, moment: str, opens: str) -> None:
    assert hours.opens_at(utc(moment)) == utc(opens)


def test_a_window_whose_begin_the_clocks_skip_opens_when_they_go_forward() -> None:
    # On 29 March 2026 there is no 02:30 in Berlin; 01:30 UTC is 03:30.
    hours = Hours.parse("02:30-05:00 Europe/Berlin")
    opens = hours.opens_at(utc("2026-03-28 12:00"))
    assert utc("2026-03-29 01:00") <= opens <= utc("2026-03-29 01:30")


@pytest.mark.parametrize(("value", "problem"), [
    ("22-06", "are not hours such as"), ("22:00", "are not hours"),
    ("24:00-06:00", "a time that no clock shows"), ("22:00-22:00", "begin and end at the same time"),
    ("22:00-06:00 Middle/Earth", "time zone 'Middle/Earth' is not known"),
    ("22:00-06:00 ../../etc/passwd", "is not known"),
])  # fmt: skip
def test_hours_that_are_none_are_refused(value: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Hours.parse(value)


def tasks_done_at(moment: datetime) -> dict[TaskKind, Task]:
    intervals = {TaskKind.FULL: 7 * DAY, TaskKind.INCREMENT: 300.0, TaskKind.CHECK: DAY, TaskKind.DRILL: DAY}
    return {kind: Task(kind, seconds, moment) for kind, seconds in intervals.items()}


def test_only_increments_begin_outside_of_the_hours() -> None:
    begun, noon = utc("2026-11-01 00:00"), utc("2026-11-29 12:00")
    tasks = tasks_done_at(utc("2026-11-20 12:00"))
    assert next_task(tasks, begun, noon)[0] == tasks[TaskKind.FULL]
    assert next_task(tasks, begun, noon, NIGHT)[0] == tasks[TaskKind.INCREMENT]
    tasks[TaskKind.INCREMENT] = tasks[TaskKind.INCREMENT].done(noon)
    assert next_task(tasks, begun, noon, NIGHT) == (None, noon + timedelta(minutes=5))
    texts = hours_texts(tasks, begun, noon, NIGHT)
    assert texts[0] == "full waits until 2026-11-29 22:00:00Z ([limits] hours)"
    assert len(texts) == 3
    del tasks[TaskKind.INCREMENT]
    assert next_task(tasks, begun, noon, NIGHT) == (None, utc("2026-11-29 22:00"))
    night = utc("2026-11-29 22:00")
    assert next_task(tasks, begun, night, NIGHT)[0] == tasks[TaskKind.FULL]
    assert hours_texts(tasks, begun, night, NIGHT) == []


def test_within_the_hours_the_task_that_has_been_due_the_longest_begins() -> None:
    begun, night = utc("2026-11-01 00:00"), utc("2026-11-29 23:00")
    tasks = {
        TaskKind.CHECK: Task(TaskKind.CHECK, DAY, utc("2026-11-28 12:00")),
        TaskKind.DRILL: Task(TaskKind.DRILL, DAY, utc("2026-11-28 11:00")),
    }
    assert next_task(tasks, begun, night, NIGHT)[0] == tasks[TaskKind.DRILL]


def test_a_failed_task_is_not_repeated_outside_of_the_hours() -> None:
    begun, late = utc("2026-11-01 00:00"), utc("2026-11-30 05:59:58")
    task = Task(TaskKind.CHECK, DAY, utc("2026-11-28 12:00")).failed(late, "no answer")
    assert next_task({TaskKind.CHECK: task}, begun, utc("2026-11-30 06:01"), NIGHT) == (None, utc("2026-11-30 22:00"))
