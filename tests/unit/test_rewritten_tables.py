"""A table that was rewritten while it was copied need not be copied again if the cut has a later TRUNCATE of it."""

from __future__ import annotations

import pytest

from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group, Table
from cutline.snapshots.create.rewritten_tables import find_incomplete, rewritten_text
from cutline.wal.segments.segments import create_segment
from tests.unit.made_segments import HELD, event, memory, table

ID = Column("id", "integer", 23, -1, 0, 1)


def rewritten(number: int) -> Table:
    return Table(number, Group(number, "public", f"t{number}", "default", 1, (ID,)), 1, 1, True, True)  # noqa: FBT003


@pytest.mark.parametrize(("changed", "position", "left"), [
    ({}, 90, [5]),
    # A transaction that the cut leaves out.
    ({}, 20, [4, 5]),
    # Of two phases: a cut may leave it out, too.
    ({"global_id": "g"}, 90, [4, 5]),
    ({"op": ord("U")}, 90, [4, 5]),
    # Before the copy, under the same number, because the table's definition is the same.
    ({"lsn": 9}, 90, [4, 5]),
    # Under an earlier number: the copy that counts then is another.
    ({"group": 3}, 90, [4, 5]),
])  # fmt: skip
def test_only_a_later_truncate_of_the_cut_makes_up_for_what_a_copy_lacks(
    changed: dict[str, object], position: int, left: list[int]
) -> None:
    store = memory()
    change = {**event(20, "T"), "group": 4, "global_id": None} | changed
    segment = create_segment(store, "wal", 1, HELD, (table([change]), table([event(30)])), continued=None).segment
    found = find_incomplete(store, [rewritten(4), rewritten(5)], [segment], Lsn(10), Lsn(position))
    assert [one.group.number for one in found] == left


def test_the_tables_are_named() -> None:
    assert rewritten_text([rewritten(4)]) == "public.t4 was rewritten while others were copied"
    assert rewritten_text([rewritten(5), rewritten(4)]).startswith("public.t4, public.t5 were rewritten")
