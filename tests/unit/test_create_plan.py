"""The plan of a full snapshot, as `create --dry-run` shows it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from cutline.cli.commands.create import plan_document, plan_lines
from cutline.fleet.config import GroupRules, Node
from cutline.nodes.groups import Column, Group, Table
from cutline.snapshots.create.full import FullPlan
from cutline.snapshots.ddl.fingerprint import Moment
from cutline.snapshots.ddl.table_changes import NodeTables, TableSelection


def plan(*rows: int | None) -> FullPlan:
    column = Column("id", "integer", 23, -1, 0)
    tables = [
        Table(number, Group(number, "public", f"t{number}", "default", 1, (column,)), estimate, 1 << 20, readable=True,
              key_is_immediate=True)
        for number, estimate in enumerate(rows, 1)
    ]  # fmt: skip
    return FullPlan(
        (), {"s1": NodeTables(tuple(tables), {}, "", Moment("", ""))}, TableSelection("f", GroupRules()), ()
    )


@pytest.mark.parametrize(("rows", "text"), [
    ((1, 700), "2 tables, about 701 rows"),
    ((), "0 tables, about 0 rows"),
    ((None, None), "2 tables, number of rows unknown (ANALYZE was never run)"),
    ((None, 0), "2 tables, number of rows unknown (ANALYZE was never run)"),
    ((None, 1, 2), "3 tables, about 3 rows, plus those of 1 table never analyzed"),
])  # fmt: skip
def test_rows_that_are_not_known_are_not_told_as_none(rows: tuple[int | None, ...], text: str) -> None:
    size = f"{len(rows)}.0 MiB" if rows else "0 B"
    assert plan_lines(plan(*rows)) == [f"s1: {text}, {size} to read on each of its nodes"]
    groups = plan_document("x", plan(*rows))["groups"]["s1"]
    assert [one["rows_estimate"] for one in groups] == list(rows)


def test_a_plan_says_where_tables_are_not_read() -> None:
    spared = replace(plan(1), readers={"s1": Node("s1-b1", "", backup_of="s1")})
    assert plan_lines(spared) == ["s1: 1 table, about 1 row, 1.0 MiB to read on each of its nodes except the primary"]
    assert plan_document("x", spared)["readers"] == {"s1": "s1-b1"}
    assert plan_document("x", plan(1))["readers"] == {}
