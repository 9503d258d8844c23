"""Commits of a small chain, and stores to put them into."""

from __future__ import annotations

from itertools import count

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from snapshots.manifest import Commit, CutRecord, FullPart
from storage.memory import InMemoryStore
from wal.archive import Segment, SegmentRange
from wal.cut_values import Cut, NodeCut, Undecided

STORES = count()


def identity(node: str, backup_of: str | None = None) -> NodeIdentity:
    return NodeIdentity(node, backup_of, "7", 1, 5, "shop", 180006, "UTF8", "C", "C", backup_of is not None)


def segment(node: str, number: int, after: int, through: int) -> Segment:
    held = SegmentRange(node, "op", after, through)
    return Segment(f"{node}/{number}", number, held, 10, "d", 1, 1, 0, 0)


def commit(number: int, chain: str = "op-0", position: int = 100) -> Commit:
    """Commit `number` of a chain of one primary and its standby, whose segments are of 100 bytes each."""
    part = FullPart(
        "fleet", "exact", {"a": identity("a"), "b": identity("b", "a")}, {"a": ()}, {"a": 0, "b": 0}, (), {"a": ()},
        GroupRules(),
    )  # fmt: skip
    cut = NodeCut(1, 2, position, (Undecided("left out", 10 + number, 11),), (20 + number,), 0)
    return Commit(
        "daily", number, f"op-{number}", chain, "2026-11-20T00:00:00Z", 1.0,
        CutRecord(f"op-{number}.1", 1, 0.001, Cut({"a": cut}, 0, 0, 0)),
        {node: (segment(node, number + 1, number * 100, number * 100 + 100),) for node in ("a", "b")},
        {"a": ()}, {"bytes": 20, "changes": 2, "transactions": 1}, full=part if number == 0 else None,
    )  # fmt: skip


def own_url() -> str:
    """The URL of a store that nobody has used."""
    return f"memory://made-commits-{next(STORES)}"


def memory() -> InMemoryStore:
    return InMemoryStore(own_url())
