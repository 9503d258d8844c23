"""How a cut handles the problems that its drains report."""

from __future__ import annotations

import pytest

from cutline.snapshots.create.make_cut import AttemptFailedError, _raise_problems
from cutline.storage.errors import SnapshotError, UnreachableError, report_of
from cutline.wal.decoding.known_definitions import SchemaMovedError, TableDescription
from cutline.wal.drain.drain_task import DrainReport
from cutline.wal.drain.slots import SlotLostError
from tests.unit.made_changes import FULL, KEYED

AWAY = UnreachableError("node a: away", details={"node": "a"})
LOST = SlotLostError(f"node b: slot s is at {5}", details={"node": "b"})


def moved_error(node: str, *names: str) -> SchemaMovedError:
    return SchemaMovedError(
        node=node, moved=[TableDescription(number, name, None, 0) for number, name in enumerate(names, start=7)]
    )


def reports_of(*problems: SnapshotError | None) -> list[DrainReport]:
    return [DrainReport(f"n{number}", problem=one and report_of(one)) for number, one in enumerate(problems)]


def test_redefined_tables_of_all_nodes_are_named_in_one_final_error() -> None:
    problems = reports_of(None, moved_error("a", "public.x"), AWAY, moved_error("c", "public.x", "public.y"))
    with pytest.raises(SchemaMovedError, match=r"node a: table public\.x") as raised:
        _raise_problems(problems)
    assert raised.value.details["moved"] == [
        {"node": "a", "group": "public.x", "oid": 7},
        {"node": "c", "group": "public.x", "oid": 7},
        {"node": "c", "group": "public.y", "oid": 8},
    ]


def test_a_problem_that_a_new_plan_would_not_resolve_is_raised_first() -> None:
    with pytest.raises(SlotLostError) as raised:
        _raise_problems(reports_of(moved_error("a", KEYED.name), LOST, moved_error("c", FULL.name)))
    assert raised.value.details["others"] == [moved_error("a", KEYED.name).message, moved_error("c", FULL.name).message]


def test_an_attempt_is_retried_if_unreachable_nodes_are_its_only_problem() -> None:
    _raise_problems(reports_of(None, None))
    with pytest.raises(AttemptFailedError, match="node a: away"):
        _raise_problems(reports_of(None, AWAY))
