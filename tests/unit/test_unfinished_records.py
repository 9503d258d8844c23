"""Which tables of an interrupted base copy are complete, by hand-made records."""

from __future__ import annotations

import pytest

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Group
from cutline.snapshots.records.commit import BASE, StoredObject
from cutline.snapshots.records.unfinished_records import (
    CopiedRange,
    CopiedRanges,
    UnfinishedBase,
    complete_tables,
    is_copy_record,
    is_unfinished_base,
)

OPERATION = "20261120T000000Z-0000000001"
# A shard with a standby, and a shard that is read on its standby only.
NODES = {"a": None, "a1": "a", "b": None, "b1": "b"}


def identity(node: str, primary: str | None) -> NodeIdentity:
    return NodeIdentity(node, primary, f"id of {node}", 1, 5, "shop", 180000, "UTF8", "C", "C", primary is not None)


def group(number: int) -> Group:
    return Group(number, "public", f"t{number}", "full", 0, ())


def plan(*numbers: int) -> UnfinishedBase:
    groups = tuple(group(number) for number in numbers)
    return UnfinishedBase(
        operation=OPERATION,
        attempt=1,
        fleet_id="f",
        global_id="same",
        baseline=tuple(identity(node, primary) for node, primary in NODES.items()),
        positions=dict.fromkeys(NODES, Lsn(7)),
        slots_complete_at={"a": Lsn(8), "b": Lsn(8)},
        readers={"b": "b1"},
        is_only_primary=False,
        rules=GroupRules(),
        groups={"a": groups, "b": groups},
        tables={"a": (), "b": ()},
        fingerprints={"a": "", "b": ""},
        objects=(),
    )


def part(node: str, task: int, *ranges: tuple[int, int, int | None]) -> CopiedRanges:
    rows = {number: 1 for number, _, _ in ranges}
    stored = StoredObject(f"{node}/{task}", BASE, node, 1, "0" * 64, rows)
    return CopiedRanges(
        operation=OPERATION,
        attempt=1,
        number=task,
        node=node,
        ranges=tuple(CopiedRange(*one) for one in ranges),
        objects=(stored,),
    )


def found(numbers: tuple[int, ...], *parts: CopiedRanges) -> tuple[dict[str, list[int]], list[str]]:
    """The numbers of complete tables by shard, and the keys of their objects."""
    copied = complete_tables(plan(*numbers), parts)
    return (
        {shard: [group.number for group in groups] for shard, groups in copied.groups.items()},
        sorted(entry.key for entry in copied.entries),
    )


def everywhere(task: int, *ranges: tuple[int, int, int | None]) -> list[CopiedRanges]:
    return [part(node, task, *ranges) for node in ("a", "a1", "b1")]


def test_a_table_is_complete_if_all_its_ranges_are_on_every_node_that_is_read() -> None:
    parts = [*everywhere(0, (1, 0, 10)), *everywhere(1, (1, 10, 20)), *everywhere(2, (1, 20, None))]

    assert found((1,), *parts) == ({"a": [1], "b": [1]}, sorted(f"{one.node}/{one.number}" for one in parts))


@pytest.mark.parametrize(
    "ranges",
    [[(1, 0, 10)], [(1, 10, None)], [(1, 0, 10), (1, 20, None)], []],
    ids=["no end", "no beginning", "a gap", "nothing"],
)
def test_a_table_with_a_gap_is_not_complete(ranges: list[tuple[int, int, int | None]]) -> None:
    parts = [one for task, pages in enumerate(ranges) for one in everywhere(task, pages)]

    assert found((1,), *parts) == ({"a": [], "b": []}, [])


def test_a_table_that_one_copy_lacks_is_not_complete_on_its_shard() -> None:
    parts = [part("a", 0, (1, 0, None)), part("b1", 1, (1, 0, None))]

    assert found((1,), *parts) == ({"a": [], "b": [1]}, ["b1/1"])


def test_tables_that_share_an_object_with_an_incomplete_one_are_not_complete() -> None:
    """Table 3 is not complete on the standby; its object on the primary has rows of 4, whose object has rows of 2."""
    parts = [
        part("a", 0, (1, 0, None), (2, 0, None)),
        part("a", 1, (3, 0, None), (4, 0, None)),
        part("a1", 0, (1, 0, None)),
        part("a1", 1, (2, 0, None), (4, 0, None)),
    ]

    assert found((1, 2, 3, 4), *parts) == ({"a": [], "b": []}, [])
    assert found((1, 2, 4), parts[0], part("a", 1, (4, 0, None)), *parts[2:])[0]["a"] == [1, 2, 4]


def test_the_names_of_documents_tell_what_can_be_continued() -> None:
    assert is_unfinished_base(["intent.json", "base-1.json", "copied-1-000003.json"])
    assert not is_unfinished_base(["intent.json", "base-1.json"])
    assert not is_unfinished_base(["intent.json", "copied-1-000003.json"])
    # What an invalid attempt has copied does not count.
    assert not is_unfinished_base(["base-2.json", "copied-1-000003.json"])
    assert not is_copy_record("resumed-1.json")
