"""The records of a simulated fleet: transactions with their parts, and the WAL of every node."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

ROWS_PER_NODE = 4
APPENDED = -1
WAL_BEGIN = 1000


@dataclass(slots=True)
class Part:
    """One branch of a global transaction on one node, or the whole of a local transaction.

    `lsn` is where its COMMIT or PREPARE begins; its changes have that position. `commit_lsn` is where its COMMIT or
    COMMIT PREPARED begins, `rollback_end` where its ROLLBACK PREPARED ends. `has_ddl`: it changes the node's catalogs,
    which show that once it is committed.
    """

    number: int
    transaction: Transaction
    node: int
    saw: frozenset[int] = frozenset()
    writes: tuple[int, ...] = ()
    lsn: int | None = None
    end: int = 0
    commit_lsn: int | None = None
    rollback_end: int | None = None
    has_ddl: bool = False


@dataclass(slots=True)
class Transaction:
    """`coordinator` is the part that commits in one phase, tagged with the global id, before all other parts."""

    number: int
    gid: str | None
    parts: list[Part] = field(default_factory=list)
    coordinator: Part | None = None
    fate: str = "open"
    waiting: int = 0
    failed: bool = False

    @property
    def numbers(self) -> set[int]:
        """The numbers of its parts."""
        return {part.number for part in self.parts}


class Change(NamedTuple):
    """A change record in a node's WAL: sets `row` to the part's value, or appends a line if `row` is APPENDED."""

    lsn: int
    seq: int
    row: int
    part: int


@dataclass(slots=True)
class Node:
    """A node's WAL: its end, its events as columns, its changes. `writers` lists each row's writers by commit order."""

    end: int = WAL_BEGIN
    op: list[int] = field(default_factory=list)
    lsn: list[int] = field(default_factory=list)
    gid: list[str | None] = field(default_factory=list)
    xid: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    writers: list[list[int]] = field(default_factory=lambda: [[] for _ in range(ROWS_PER_NODE)])
    locked: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Wave:
    """Where the start and finish markers of one cut end on every node.

    `reach`: how many bytes before the window the first segment of each node may begin. `catalogs_before` are the parts
    whose DDL the catalogs show before the markers, `catalogs` those that they show when they are read for the commit;
    `prepared` are the parts that are prepared a little earlier than that.
    """

    starts: dict[int, int] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)
    reach: dict[int, int] = field(default_factory=dict)
    catalogs_before: frozenset[int] = frozenset()
    prepared: frozenset[int] = frozenset()
    catalogs: frozenset[int] = frozenset()
