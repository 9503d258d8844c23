"""A model of a fleet for simulating cuts: nodes that append records to their WAL, and one clock.

It knows nothing of the rule that is tested. A prepared transaction keeps the rows that it wrote locked, and
every transaction remembers whose rows it saw.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from wal.segment_schema import COMMIT, COMMIT_PREPARED, MARKER, PREPARE, ROLLBACK_PREPARED

CUTS_PER_HISTORY = 12
ROWS_PER_NODE = 6


@dataclass(slots=True)
class Transaction:
    """`at`: where its changes stand on each node; `saw`: whose rows it read or overwrote there."""

    gid: str | None
    nodes: tuple[int, ...]
    at: dict[int, int] = field(default_factory=dict)
    prepared_end: dict[int, int] = field(default_factory=dict)
    settled_at: dict[int, int] = field(default_factory=dict)
    saw: dict[int, set[int]] = field(default_factory=dict)
    wrote: dict[int, set[int]] = field(default_factory=dict)
    fate: str = "open"
    open_on: set[int] = field(default_factory=set)


@dataclass(slots=True)
class MadeCut:
    """Start and finish of one cut on every node."""

    starts: dict[int, int] = field(default_factory=dict)
    finishes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Node:
    """A node's WAL end, its events as columns, who wrote each row last, and who holds it locked."""

    end: int = 1000
    events: list[tuple[int, int, str | None, int]] = field(default_factory=list)
    written: dict[int, int] = field(default_factory=dict)
    locked: dict[int, int] = field(default_factory=dict)


class World:
    """Some nodes, and all that happens on them in the order of one clock that no node knows."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.nodes = [Node() for _ in range(self.random.randint(2, 4))]
        self.transactions: list[Transaction] = []
        self.cuts: list[MadeCut] = []
        self.agenda: list[tuple[float, int, Callable[[float], None]]] = []
        self.ticket = count()
        self.delay = self.random.choice([0.2, 1.0, 4.0])

    def run(self) -> None:
        """Plan transactions and cuts, then let everything happen."""
        span = 30.0
        for _ in range(self.random.randint(40, 80)):
            plan = self.begin_global if self.random.random() < 0.5 else self.begin_local
            self.plan(self.random.uniform(0, span), plan)
        for place in range(CUTS_PER_HISTORY - 1):
            # The slowest cut is over before the next one can begin.
            self.plan(span * (place + self.random.random() * 0.3) / CUTS_PER_HISTORY, self.begin_cut)
        self.happen()
        # A last cut after everything is settled: nothing may be left out of it.
        self.begin_cut(1e9)
        self.happen()

    def happen(self) -> None:
        while self.agenda:
            now, _, action = heapq.heappop(self.agenda)
            action(now)

    def plan(self, when: float, action: Callable[[float], None]) -> None:
        heapq.heappush(self.agenda, (when, next(self.ticket), action))

    def append(self, node: int, op: int, gid: str | None, *, lsn: int | None = None) -> tuple[int, int]:
        """Write a record of random size, with WAL of others before it; return its beginning and end."""
        place = self.nodes[node]
        begin = place.end + self.random.choice([0, 0, 8, 120])
        place.end = begin + self.random.choice([40, 64, 200])
        at = begin if lsn is None else lsn
        place.events.append((op, place.end if op == MARKER else at, gid, place.end))
        return begin, place.end

    def touch(self, number: int, node: int) -> bool:
        """Read and write some rows; False where a prepared transaction holds one that is to be written."""
        place, transaction = self.nodes[node], self.transactions[number]
        rows = self.random.sample(range(ROWS_PER_NODE), self.random.randint(1, 3))
        writes = set(rows[: self.random.randint(1, len(rows))])
        if any(row in place.locked for row in writes):
            return False
        transaction.saw[node] = {place.written[row] for row in rows if row in place.written}
        transaction.wrote[node] = writes
        return True

    def begin_local(self, now: float) -> None:
        node = self.random.randrange(len(self.nodes))
        number = len(self.transactions)
        self.transactions.append(Transaction(None, (node,)))
        if not self.touch(number, node):
            self.transactions[number].fate = "rolled back"
            return
        begin, _ = self.append(node, COMMIT, None)
        self.transactions[number].at[node] = self.transactions[number].settled_at[node] = begin
        self.transactions[number].fate = "committed"
        self.nodes[node].written.update(dict.fromkeys(self.transactions[number].wrote[node], number))

    def begin_global(self, now: float) -> None:
        chosen = self.random.sample(range(len(self.nodes)), self.random.randint(1, len(self.nodes)))
        self.begin_two_phase(f"g{len(self.transactions)}", tuple(chosen), now)

    def begin_two_phase(self, gid: str, nodes: tuple[int, ...], now: float) -> None:
        number = len(self.transactions)
        self.transactions.append(Transaction(gid, nodes, open_on=set(nodes)))
        for node in nodes:
            self.plan(now + self.random.random() * 1.5, partial(self.prepare, number, node))

    def prepare(self, number: int, node: int, now: float) -> None:
        one = self.transactions[number]
        if self.touch(number, node):
            one.at[node], one.prepared_end[node] = self.append(node, PREPARE, one.gid)
            self.nodes[node].locked.update(dict.fromkeys(one.wrote[node], number))
        one.open_on.discard(node)
        if not one.open_on:
            # Undecided for a moment or for many cuts.
            wait = self.random.choice([0.0, 0.3, 0.3, 6.0, 25.0])
            self.plan(now + self.random.random() * wait, partial(self.decide, number))

    def decide(self, number: int, now: float) -> None:
        one = self.transactions[number]
        is_whole = len(one.at) == len(one.nodes) and self.random.random() > 0.15
        one.fate = "committed" if is_whole else "rolled back"
        one.open_on = set(one.at)
        for node in one.at:
            lag = self.random.choice([0.1, 1.0, 1.0, 12.0])
            self.plan(now + self.random.random() * lag, partial(self.settle, number, node))

    def settle(self, number: int, node: int, now: float) -> None:
        one, place = self.transactions[number], self.nodes[node]
        for row in one.wrote[node]:
            del place.locked[row]
        if one.fate == "committed":
            one.settled_at[node], _ = self.append(node, COMMIT_PREPARED, one.gid)
            place.written.update(dict.fromkeys(one.wrote[node], number))
            return
        self.append(node, ROLLBACK_PREPARED, one.gid, lsn=one.prepared_end[node])
        one.open_on.discard(node)
        if not one.open_on and one.gid and self.random.random() < 0.5:
            self.begin_two_phase(one.gid, one.nodes, now)  # an application tries again under the same gid

    def begin_cut(self, now: float) -> None:
        cut = MadeCut()
        self.cuts.append(cut)
        for node in range(len(self.nodes)):
            self.plan(now + self.random.random() * self.delay * 0.25, partial(self.mark, cut, cut.starts, node))

    def mark(self, cut: MadeCut, written: dict[int, int], node: int, now: float) -> None:
        _, written[node] = self.append(node, MARKER, None)
        if len(written) == len(self.nodes) and written is cut.starts:
            for other in range(len(self.nodes)):
                late = now + self.random.random() * self.delay * 0.15
                self.plan(late, partial(self.mark, cut, cut.finishes, other))
