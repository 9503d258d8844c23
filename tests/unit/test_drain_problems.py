"""What a cut makes of the problems that its drains report."""

from __future__ import annotations

import pytest

from snapshots.create.make_cut import _AttemptFailedError, _raise_problems
from storage.errors import SnapshotError, UnreachableError, report_of
from tests.unit.made_changes import FULL, KEYED
from wal.decoding.known_definitions import SchemaMovedError, TableDescription
from wal.drain.drain_task import DrainReport
from wal.slots.slots import SlotLostError

AWAY = UnreachableError("node a: away", details={"node": "a"})
LOST = SlotLostError(f"node b: slot s is at {5}", details={"node": "b"})


def moved(node: str, *names: str) -> SchemaMovedError:
    return SchemaMovedError(
        node=node, moved=[TableDescription(number, name, None, 0) for number, name in enumerate(names, start=7)]
    )


def reports(*problems: SnapshotError | None) -> list[DrainReport]:
    return [DrainReport(f"n{number}", problem=one and report_of(one)) for number, one in enumerate(problems)]


def test_tables_that_moved_are_named_together_and_end_the_attempts() -> None:
    problems = reports(None, moved("a", "public.x"), AWAY, moved("c", "public.x", "public.y"))
    with pytest.raises(SchemaMovedError, match=r"node a: table public\.x") as raised:
        _raise_problems(problems)
    assert raised.value.details["moved"] == [
        {"node": "a", "group": "public.x", "oid": 7},
        {"node": "c", "group": "public.x", "oid": 7},
        {"node": "c", "group": "public.y", "oid": 8},
    ]


def test_what_planning_anew_would_not_mend_comes_first() -> None:
    with pytest.raises(SlotLostError) as raised:
        _raise_problems(reports(moved("a", KEYED.name), LOST, moved("c", FULL.name)))
    assert raised.value.details["others"] == [moved("a", KEYED.name).message, moved("c", FULL.name).message]


def test_nodes_that_went_away_alone_make_an_attempt_void() -> None:
    _raise_problems(reports(None, None))
    with pytest.raises(_AttemptFailedError, match="node a: away"):
        _raise_problems(reports(None, AWAY))
