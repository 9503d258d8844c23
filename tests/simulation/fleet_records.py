"""What a simulated fleet is made of: transactions and their parts, and what stands in every node's WAL."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ROWS_PER_NODE = 4
APPENDED = -1
WAL_BEGIN = 1000


@dataclass(slots=True)
class Part:
    """What a transaction does on one node: one branch of it, or all of a local one.

    Its changes stand at `lsn`, where its COMMIT or PREPARE begins. `settled`: where its COMMIT (PREPARED) begins;
    `undone_end`: where its ROLLBACK PREPARED ends.
    """

    number: int
    transaction: Transaction
    node: int
    saw: frozenset[int] = frozenset()
    writes: tuple[int, ...] = ()
    lsn: int | None = None
    end: int = 0
    settled: int | None = None
    undone_end: int | None = None


@dataclass(slots=True)
class Transaction:
    """`coordinator`: the part that commits in one phase under the global id's tag, before any of the others."""

    number: int
    gid: str | None
    parts: list[Part] = field(default_factory=list)
    coordinator: Part | None = None
    fate: str = "open"
    waiting: int = 0
    failed: bool = False

    @property
    def numbers(self) -> set[int]:
        """Those of its parts."""
        return {part.number for part in self.parts}


class Change(NamedTuple):
    """A change record in a node's WAL: `row` now has its part's value; APPENDED appends a line instead."""

    lsn: int
    seq: int
    row: int
    part: int


@dataclass(slots=True)
class Node:
    """A node's WAL: its end, its events as columns, its changes. `chains`: who wrote each row, in commit order."""

    end: int = WAL_BEGIN
    op: list[int] = field(default_factory=list)
    lsn: list[int] = field(default_factory=list)
    gid: list[str | None] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    chains: list[list[int]] = field(default_factory=lambda: [[] for _ in range(ROWS_PER_NODE)])
    locked: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Wave:
    """Where the start and finish markers of one cut end on every node.

    `reach`: how far back the segments go in which each node's events are found.
    """

    starts: dict[int, int] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    reach: dict[int, int] = field(default_factory=dict)
