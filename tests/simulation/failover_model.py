"""A fleet whose primaries fail over: a model of servers with timelines, slots and WAL that a promotion may lose.

A shard has one server that accepts writes. A promotion replaces it by a server that has its WAL up to the *switch*;
what is after the switch is lost. A server that was replaced may come back and take its place again, with the WAL that
it has. The rows, the locks and the prepared transactions of a shard follow from the WAL of its server.

As PostgreSQL does, a server that takes over knows nothing of transactions that were running; they fail. A prepared
transaction whose end is lost is prepared again, and its application repeats the decision.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, PREPARE, ROLLBACK_PREPARED
from tests.simulation.fleet_model import LATE, Choose, World
from tests.simulation.fleet_records import ROWS_PER_NODE, WAL_BEGIN, Part, Transaction

NODES_MAX = 3
SPAN = 240
TRANSACTIONS_MIN, TRANSACTIONS_MORE = 24, 24
FAILOVERS_MIN, FAILOVERS_MORE = 3, 5
# How many of the last records a promotion may lose: mostly few.
LOSSES = (1, 1, 2, 3, 6, 24)
SWITCH_BYTES = 24
# At one of so many calls of a command, something else happens.
IDLE_ODDS = 6


@dataclass(frozen=True, slots=True)
class Record:
    """A record of a server's WAL, from `begin` to `end`; `content` is that of a marker.

    `lsn` is its position as an event (wal/segments/segments.py), and `at` the time when it was written.
    """

    op: int
    begin: int
    end: int
    gid: str | None
    xid: int
    lsn: int
    at: int = 0
    content: bytes = b""


@dataclass(slots=True, eq=False)
class Server:
    """A server: its WAL, its timeline, where its earlier timelines ended, and the positions of its slots by name.

    `confirmed` has all positions that slots of the shard had so far.
    """

    records: list[Record] = field(default_factory=list)
    end: int = WAL_BEGIN
    timeline: int = 1
    switches: dict[int, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    confirmed: list[int] = field(default_factory=list)


class FailoverWorld(World):
    """A fleet with failovers. Commands call `pass_some` wherever time passes; the world goes on meanwhile."""

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.nodes = self.nodes[:NODES_MAX]
        self.servers = [Server() for _ in self.nodes]
        self.former: list[list[Server]] = [[] for _ in self.nodes]
        # The primaries of standbys, by standby: here there are none (tests/simulation/promotion_model.py).
        self.standbys_of: dict[str, str] = {}
        self.dead: set[int] = set()
        self.events: list[str] = []
        self.sent: dict[bytes, Record] = {}
        self.on_time: Callable[[], None] = lambda: None
        for _ in range(TRANSACTIONS_MIN + choose(TRANSACTIONS_MORE)):
            self._plan(choose(SPAN), self._begin_transaction)
        for _ in range(FAILOVERS_MIN + choose(FAILOVERS_MORE)):
            self._plan(choose(SPAN), self.disrupt)

    def server(self, node: str) -> Server | None:
        """The server that has the node's role now; None if it is down."""
        return self.servers[int(node)]

    @property
    def is_over(self) -> bool:
        """Whether nothing more is going to happen by itself."""
        return not self._agenda

    def pass_some(self) -> None:
        """Let a little time pass, in which something happens or nothing."""
        self.on_time()
        if not self.choose(IDLE_ODDS):
            self.pass_one()

    def pass_one(self) -> None:
        """Let the next thing happen."""
        if self._agenda:
            self._now, _, action, arguments = heapq.heappop(self._agenda)
            action(*arguments)

    def finish(self) -> None:
        """Let everything happen that is planned, and decide what is in doubt."""
        while not self.is_over or any(map(is_prepared, self.parts)):
            for part in [part for part in self.parts if is_prepared(part) and self.is_over]:
                (self._commit_prepared if part.transaction.fate == "committed" else self._roll_back)(part)
            self.pass_one()

    def write_marker(self, number: int, content: bytes, op: int) -> int:
        """Write a marker on a node; return where it ends."""
        _, end = self._append(number, op, None)
        server = self.servers[number]
        last = server.records[-1]
        server.records[-1] = Record(op, last.begin, end, None, 0, end, content=content)
        return end

    def _append(self, number: int, op: int, gid: str | None, xid: int = 0, lsn: int | None = None) -> tuple[int, int]:
        begin, end = super()._append(number, op, gid, xid, lsn)
        server = self.servers[number]
        server.records.append(Record(op, begin, end, gid, xid, begin if lsn is None else lsn, len(self.story)))
        server.end = end
        return begin, end

    def _begin_global(self, gid: str, nodes: list[int], *, tagged: bool) -> None:
        # No gid is used again: after a loss, nobody could tell the two transactions apart.
        if nodes:
            super()._begin_global(f"g{len(self.transactions)}", nodes, tagged=tagged)

    def _commit_or_prepare(self, part: Part) -> None:
        if part.number not in self.dead:
            super()._commit_or_prepare(part)
        elif part.transaction.gid is not None:
            part.transaction.failed = True
            self._finish_part(part.transaction)

    def _commit(self, part: Part, gid: str | None) -> None:
        if part.number not in self.dead:
            super()._commit(part, gid)

    def _commit_prepared(self, part: Part) -> None:
        if is_prepared(part):
            super()._commit_prepared(part)

    def _roll_back(self, part: Part) -> None:
        if is_prepared(part):
            super()._roll_back(part)

    def _decide(self, one: Transaction) -> None:
        # A coordinator that died before its one-phase commit decided nothing: its application rolls back.
        one.failed |= one.coordinator is not None and one.coordinator.number in self.dead
        super()._decide(one)

    def disrupt(self, number: int | None = None) -> None:
        """Let a node, or any, lose its slots, or let another server take its place."""
        number = self.choose(len(self.nodes)) if number is None else number
        kind = self.choose(8)
        if kind == 7:
            self.servers[number].slots.clear()
            self.events.append(f"node {number} loses its slots")
        elif kind in (5, 6) and self.former[number]:
            self._return(number)
        else:
            self._promote(number, loses=kind > 1)

    def _promote(self, number: int, *, loses: bool) -> None:
        """Replace the server by one that has all of its WAL, or all but its last records."""
        old = self.servers[number]
        lost = 1 + self.choose(LOSSES[self.choose(len(LOSSES))]) if loses else 0
        kept = old.records[: max(len(old.records) - lost, 0)]
        switch = old.end if not loses else kept[-1].end if kept else WAL_BEGIN
        new = Server(kept, switch, old.timeline + 1, {**old.switches, old.timeline: switch})
        new.confirmed = [position for position in old.confirmed if position <= switch]
        which = self.choose(4)
        if new.confirmed and which < 3:
            at = new.confirmed[self.choose(len(new.confirmed))] if which == 2 else max(new.confirmed)
            new.slots = dict.fromkeys(old.slots, at)
        self.former[number].append(old)
        self.events.append(f"node {number} is promoted to {new.timeline} at {switch}, with {new.slots}")
        self._become(number, new)

    def _return(self, number: int) -> None:
        """Let a server that was replaced take its place again, with or without a promotion."""
        former = self.former[number].pop(self.choose(len(self.former[number])))
        if self.choose(2):
            former.switches = {**former.switches, former.timeline: former.end}
            former.timeline += 1
        self.former[number].append(self.servers[number])
        self.events.append(f"node {number} is the former server again, on {former.timeline}")
        self._become(number, former)

    def _become(self, number: int, server: Server) -> None:
        """Let the server be the node: its rows, locks and transactions are those of its WAL."""
        node = self.nodes[number]
        parts = [part for part in self.parts if part.node == number]
        had = {part.number for part in parts if part.lsn is not None}
        self.dead |= {part.number for part in parts if part.lsn is None and part.number in node.locked.values()}
        self.servers[number] = server
        server.end += SWITCH_BYTES
        node.end, node.locked = server.end, {}
        node.writers = [[] for _ in range(ROWS_PER_NODE)]
        for part in parts:
            part.lsn = part.commit_lsn = part.rollback_end = None
        for record in server.records:
            self._replay(number, record)
        for part in parts:
            self._follow(part, had=part.number in had)

    def _replay(self, number: int, record: Record) -> None:
        node = self.nodes[number]
        if record.op not in (COMMIT, PREPARE, COMMIT_PREPARED, ROLLBACK_PREPARED):
            return
        part = self.parts[record.xid]
        if record.op in (COMMIT, PREPARE):
            part.lsn, part.end = record.begin, record.end
            node.locked.update(dict.fromkeys(part.writes, part.number))
        if record.op == ROLLBACK_PREPARED:
            part.rollback_end = record.end
            self._release(part)
        elif record.op in (COMMIT, COMMIT_PREPARED):
            part.commit_lsn = record.begin
            self._make_visible(part)

    def _follow(self, part: Part, *, had: bool) -> None:
        """Take a lost part out of its transaction, or back into it; let its application repeat a lost decision."""
        one = part.transaction
        if had and part.lsn is None:
            one.parts = [other for other in one.parts if other is not part]
            one.failed |= one.fate == "open"
        elif part.lsn is not None and part not in one.parts:
            one.parts.append(part)
        if is_prepared(part) and one.fate != "open" and (delay := LATE[self.choose(len(LATE))]) is not None:
            self._plan(delay, self._commit_prepared if one.fate == "committed" else self._roll_back, part)


def is_prepared(part: Part) -> bool:
    """Whether the part is prepared on its node, and not decided there."""
    is_open = part.lsn is not None and part.commit_lsn is None and part.rollback_end is None
    return is_open and part.transaction.gid is not None
