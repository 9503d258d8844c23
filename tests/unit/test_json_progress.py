"""Progress as JSON lines: one object per line, about one a second for each node, with rate and time left."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from cutline.cli.output import displays
from cutline.cli.output.arguments import PROGRESS_SCHEMA
from cutline.cli.output.displays import JsonProgress
from cutline.fleet.progress import Reading

FIELDS = {
    "schema", "command", "operation", "step", "state", "node", "done", "total", "unit", "rate", "seconds",
    "seconds_left", "operation_seconds_left", "operation_seconds_left_is_rough", "at",
}  # fmt: skip


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(displays.time, "monotonic", clock.monotonic)
    return clock


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_step_has_a_first_line_at_most_one_a_second_and_a_last_one(clock: Clock) -> None:
    stream = io.StringIO()
    with JsonProgress(stream, "create") as steps:
        steps.step("copy base", total=100, unit="tasks")
        for _ in range(40):
            clock.now += 0.1
            steps.advance(2)
        steps.note("node a waits for a lock")
    *lines, note, last = lines_of(stream)
    assert all(line.keys() == FIELDS and line["schema"] == PROGRESS_SCHEMA for line in (*lines, last))
    assert note.keys() == {"schema", "command", "operation", "note", "at"}
    # 20 a second, so at the third one 20 are left of 80 at that rate.
    assert [(line["state"], line["done"]) for line in lines[:1]] == [("running", 0)]
    assert 4 <= len(lines) <= 5
    assert lines[-1]["rate"] == pytest.approx(20)
    assert lines[-1]["seconds_left"] == pytest.approx((100 - lines[-1]["done"]) / 20)
    assert (last["state"], last["done"], last["total"], last["unit"]) == ("done", 80, 100, "tasks")
    assert last["seconds_left"] == 0.0
    assert last["command"] == "create"


def test_each_node_has_lines_and_a_rate_from_its_first_reading_on(clock: Clock) -> None:
    stream = io.StringIO()
    with JsonProgress(stream, "restore") as steps:
        steps.step("load rows")
        clock.now += 5
        for done in (1000, 1500, 2000):
            steps.tell(Reading(done, 5000, "rows", "s1", "op", 60.0, is_rough=True))
            steps.tell(Reading(done // 2, 5000, "rows", "s2", "op", 60.0))
            clock.now += 1.0
    lines = lines_of(stream)
    found = [line for line in lines if line["node"] == "s1"]
    assert [line["done"] for line in found] == [1000, 1500, 2000]
    assert [line["rate"] for line in found] == [None, pytest.approx(500), pytest.approx(500)]
    assert [line["seconds_left"] for line in found] == [None, pytest.approx(7), pytest.approx(6)]
    assert {line["operation"] for line in found} == {"op"}
    assert {line["operation_seconds_left"] for line in found} == {60.0}
    # The last word is that of s2.
    assert {line["operation_seconds_left_is_rough"] for line in lines if line["node"]} == {True, False}
    # It is counted down until something else is said.
    assert lines[-1]["operation_seconds_left"] == pytest.approx(59.0)


def test_the_last_reading_is_shown_even_within_the_second(clock: Clock) -> None:
    stream = io.StringIO()
    with JsonProgress(stream, "restore") as steps:
        steps.step("load rows")
        steps.tell(Reading(10, 30, "rows", "s1"))
        clock.now += 0.1
        steps.tell(Reading(30, 30, "rows", "s1"))
    assert [line["done"] for line in lines_of(stream) if line["node"] == "s1"] == [10, 30]


def test_an_error_stops_the_step_and_points_are_shown_only_if_verbose() -> None:
    for verbose in (False, True):
        stream = io.StringIO()
        steps = JsonProgress(stream, "create", verbose=verbose).__enter__()
        steps.step("cut")
        steps.reached("marker written", node="a")
        steps.__exit__(RuntimeError, RuntimeError(), None)
        lines = lines_of(stream)
        assert [line["point"] for line in lines if "point" in line] == ["marker written"] * verbose
        assert lines[-1]["state"] == "stopped"
