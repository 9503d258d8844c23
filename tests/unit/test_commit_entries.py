"""What a commit says of itself, and what no create writes. The chain was written from PostgreSQL's servers."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from msgspec import structs

from cutline.check.commit_entries import check_entries
from cutline.check.report import Findings, SnapshotReport
from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, list_large_objects
from cutline.wal.segments.archive import OpenTransaction, Segment
from tests.unit.made_definitions import MadeChain


@pytest.fixture(scope="module")
def made() -> MadeChain:
    return MadeChain.kept()


def findings_of(chain: Chain) -> Findings:
    findings = Findings(SnapshotReport(chain.name, chain.last.increment))
    check_entries(chain, findings)
    return findings


def conflicts(made: MadeChain) -> list[tuple[str, str]]:
    return [(one.kind, one.detail) for one in findings_of(made.chain).report.conflicts]


def with_values(made: MadeChain, increment: int, **values: Any) -> MadeChain:
    return made.with_commit(increment, lambda one: structs.replace(one, **values))


def test_a_chain_as_it_was_written_is_consistent(made: MadeChain) -> None:
    findings = findings_of(made.chain)
    assert (findings.report.conflicts, findings.report.doubts) == ([], [])


def test_a_cut_belongs_to_the_operation_of_its_commit(made: MadeChain) -> None:
    def change(commit: Any) -> Commit:
        return structs.replace(commit, cut=structs.replace(commit.cut, id="20261127T000000Z-0123456789.1"))

    operation = made.chain.commits[1].operation
    assert conflicts(made.with_commit(1, change)) == [
        ("cut", f"its cut is 20261127T000000Z-0123456789.1, but attempt 1 of its operation made cut {operation}.1")
    ]
    (other,) = conflicts(with_values(made, 0, chain="20261127T000000Z-0123456789"))
    assert other[1].startswith("its chain is 20261127T000000Z-0123456789, but the operation of a full snapshot is")
    databases = made.chain.commits[1].databases
    (fewer,) = conflicts(with_values(made, 1, databases={"s1": databases["s1"]}))
    assert fewer == ("cut", "it describes the databases of s1 instead of s1, s2")


@pytest.mark.parametrize(("number", "expected"), [(0, 0), (1, 1)])
def test_only_a_full_snapshot_is_resumed(made: MadeChain, number: int, expected: int) -> None:
    """The id of a cut contains the number of the resumption."""

    def change(commit: Any) -> Commit:
        return structs.replace(commit, cut=structs.replace(commit.cut, id=f"{commit.operation}.r2.1"))

    assert len(conflicts(made.with_commit(number, change))) == expected


def test_objects_belong_to_the_operation_that_lists_them(made: MadeChain) -> None:
    """As if the DDL of the commit before had been listed again."""
    old = made.chain.full.copied
    new = made.chain.increments[1].definition_changes
    assert new is not None
    ddl = next(one for one in old if one.kind == "archive" and one.node == "s1")
    objects = tuple(ddl if (one.kind, one.node) == ("archive", "s1") else one for one in new.objects)
    operation = made.chain.commits[2].operation
    assert conflicts(made.with_changes(2, objects=objects)) == [
        ("operation", f"object {ddl.key} does not belong to operation {operation}, which lists it")
    ]


def with_segment(made: MadeChain, increment: int, **values: Any) -> MadeChain:
    """The chain with other values in the last segment of s1 that an increment lists."""

    def change(commit: Any) -> Commit:
        *before, last = commit.segments["s1"]
        return structs.replace(commit, segments=commit.segments | {"s1": (*before, structs.replace(last, **values))})

    return made.with_commit(increment, change)


@pytest.mark.parametrize(("minutes", "is_doubtful"), [(0, False), (11, True), (-11, True), (None, True)])
def test_segments_are_of_operations_between_two_commits(
    made: MadeChain, minutes: int | None, *, is_doubtful: bool
) -> None:
    """Not of an operation that began over ten minutes after the increment, or before the commit before it."""
    operation = "another"
    if minutes is not None:
        began = datetime.strptime(made.chain.commits[2].operation[:16], "%Y%m%dT%H%M%SZ")
        operation = f"{began + timedelta(minutes=minutes):%Y%m%dT%H%M%SZ}-ffffffffff"
    changed = with_segment(made, 2, operation=operation)
    findings = findings_of(changed.chain)
    assert findings.report.conflicts == []
    assert [doubt.node for doubt in findings.report.doubts] == ["s1"] * is_doubtful


def test_a_commit_does_not_end_inside_a_transaction(made: MadeChain) -> None:
    through = made.chain.commits[1].segments["s1"][-1].through
    (ends,) = conflicts(with_segment(made, 1, open=OpenTransaction(Lsn(through + 8), 3, 0)))
    assert ends == ("archive", f"the archive of a commit ends inside the transaction at {Lsn(through + 8)}")
    within = [detail for _, detail in conflicts(with_segment(made, 1, open=OpenTransaction(Lsn(through - 8), 3, 0)))]
    assert f"a transaction at {Lsn(through - 8)} is open at its end, which is {through}" in within


def test_a_transaction_that_stays_open_goes_on(made: MadeChain) -> None:
    last = made.chain.commits[1].segments["s1"][-1]
    opened = [OpenTransaction(Lsn(last.through + 8), seq, 0) for seq in (9, 5)]

    def chain_with(*opens: OpenTransaction) -> MadeChain:
        parts = [structs.replace(last, key=f"{number}", open=one) for number, one in enumerate((*opens, None))]
        return with_segments(made, tuple(parts))

    assert conflicts(chain_with(opened[1], opened[0])) == []
    assert conflicts(chain_with(*opened)) == [
        ("archive", f"it continues the transaction at {opened[0].lsn}, but only up to change 5 of it")
    ]


def with_segments(made: MadeChain, segments: tuple[Segment, ...]) -> MadeChain:
    return made.with_commit(1, lambda one: structs.replace(one, segments=one.segments | {"s1": segments}))


def out(kind: LeftOutKind, name: str, node: str = "s1", count: int = 1) -> LeftOut:
    return LeftOut(node, kind, name, "why", count)


@pytest.mark.parametrize(
    ("added", "detail"),
    [
        (out(LeftOutKind.UNLOGGED_TABLE, "public.x", "s1-b1"), "it leaves out parts of s1-b1, which is no primary"),
        (
            out(LeftOutKind.APPEND_ONLY_TABLE, "public.long"),
            "it names other append-only tables than it lists: public.long on s1",
        ),
        (out(LeftOutKind.STANDBY_COPY, "s1-b2"), "it names other standbys without a copy than the full snapshot"),
    ],
)
def test_what_is_left_out_is_what_the_commit_says_elsewhere(made: MadeChain, added: LeftOut, detail: str) -> None:
    left_out = (*made.chain.commits[1].left_out, added)
    assert conflicts(with_values(made, 1, left_out=left_out)) == [("left-out", detail)]


def test_large_objects_are_counted_as_the_full_snapshot_stored_them(made: MadeChain) -> None:
    keys = {one.node: one.key for one in list_large_objects(made.chain.full)}
    stored = "which stored 1 on s1, 1 on s2 in"
    assert conflicts(with_values(made, 2, left_out=())) == [
        (
            "left-out",
            f"it warns of large objects of the full snapshot (none), {stored} {keys['s1']}, {keys['s2']}",
        )
    ]
    # If all commits say so, the full snapshot is named once, with the objects of that node.
    changed = made
    for increment, commit in enumerate(made.chain.commits):
        kind = LeftOutKind.LARGE_OBJECTS_OF_FULL
        left_out = [
            structs.replace(one, count=2) if (one.kind, one.node) == (kind, "s1") else one for one in commit.left_out
        ]
        changed = with_values(changed, increment, left_out=tuple(left_out))
    assert conflicts(changed) == [
        ("left-out", f"it warns of large objects of the full snapshot (2 on s1, 1 on s2), {stored} {keys['s1']}")
    ]


def test_groups_are_those_that_the_rules_allow(made: MadeChain) -> None:
    excluding = with_values(made, 0, rules=GroupRules(exclude=("public.lo*",)))
    assert {detail for _, detail in conflicts(excluding)} == {
        "the rules of the full snapshot exclude public.long, but the chain has their rows"
    }
    append_only = made.chain.full.groups | {
        "s1": tuple(
            structs.replace(group, identity="append_only") if group.table == "unkeyed" else group
            for group in made.chain.full.groups["s1"]
        )
    }
    marks = (out(LeftOutKind.APPEND_ONLY_TABLE, "public.unkeyed"),)
    changed = with_values(made, 0, groups=append_only)
    for increment in (0, 1, 2):
        changed = with_values(changed, increment, left_out=(*made.chain.commits[increment].left_out, *marks))
    unruled = "public.unkeyed are append-only tables, but the rules of the full snapshot do not say so"
    assert conflicts(changed) == [("rules", unruled)]
    assert conflicts(with_values(changed, 0, rules=GroupRules(append_only=("public.un*",)))) == []
    both = (*made.chain.last.left_out, out(LeftOutKind.UNLOGGED_TABLE, "public.long"))
    assert conflicts(with_values(made, 2, left_out=both)) == [
        ("rules", "the newest commit says that it leaves out public.long, but lists their rows")
    ]


def test_increments_may_exclude_more_than_the_full_snapshot(made: MadeChain) -> None:
    excluded = (*made.chain.last.left_out, out(LeftOutKind.EXCLUDED_TABLE, "public.temporary"))
    chain = replace(made, chain=with_values(made, 2, left_out=excluded).chain)
    assert conflicts(chain) == []
