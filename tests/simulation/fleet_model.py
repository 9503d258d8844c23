"""A model of a fleet for simulating cuts: nodes that append records to their WAL, and one clock.

The model knows nothing of the rule under test. One scheduler asks `choose(n)` for a number below n at every decision,
so a seed determines the whole history; 0 is the simplest choice. A transaction keeps the rows that it writes locked
until it ends, and records whose rows it saw.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from cutline.wal.segments.segments import COMMIT, COMMIT_PREPARED, MARKER, PREPARE, ROLLBACK_PREPARED
from tests.simulation.fleet_records import APPENDED, ROWS_PER_NODE, Change, Node, Part, Transaction, Wave

WAVES = 3
TRANSACTIONS_MAX = 16
SPAN = 40
SOON = (0, 0, 0, 1, 1, 2, 3, 6)
# Delays of a decision: from none to many cuts; None is never.
LATE = (0, 0, 0, 1, 2, 8, 25, None)
RECORD_SIZES = (40, 64, 200)
FOREIGN_SIZES = (0, 0, 8, 120)
REACHES = (0, 300, 10_000)

Choose = Callable[[int], int]
Look = Callable[[Wave], None]


def seeded(seed: int) -> Choose:
    """Decisions drawn from a seed."""
    draw = random.Random(seed).random
    return lambda size: int(draw() * size)


class World:
    """Some nodes, and everything that happens on them, ordered by one clock that no node knows.

    `label` is part of every global id, so that two worlds never share one.
    """

    def __init__(
        self, choose: Choose, transactions_max: int = TRANSACTIONS_MAX, waves: int = WAVES, label: str = ""
    ) -> None:
        self.choose = choose
        self._label = label
        self._transactions_max, self._waves_left = transactions_max, waves
        self.nodes = [Node() for _ in range(2 + choose(4))]
        self.parts: list[Part] = []
        self.transactions: list[Transaction] = []
        self.waves: list[Wave] = []
        self.story: list[tuple[int, int, int, str | None, int]] = []
        self.reused_gids = 0
        self._agenda: list[tuple[int, int, Callable[..., None], tuple[object, ...]]] = []
        self._ticket = 0
        self._now = 0
        self._marker_delays = ((0, 1), (0, 3, 8), (0, 5, 10, 15))[choose(3)]

    def __repr__(self) -> str:
        """The interleaving: one line per record, by the clock."""
        names = {COMMIT: "COMMIT", PREPARE: "PREPARE", COMMIT_PREPARED: "COMMIT PREPARED"}
        names |= {ROLLBACK_PREPARED: "ROLLBACK PREPARED", MARKER: "marker"}
        lines = [f"  {now:3} node {node} {lsn:6} {names[op]} {gid or ''}" for now, node, op, gid, lsn in self.story]
        return "\n".join([f"{len(self.nodes)} nodes", *(line.rstrip() for line in lines)])

    def run(self) -> None:
        """Run everything that is planned, then make a last cut."""
        for _ in range(1 + self.choose(self._transactions_max)):
            self._plan(self.choose(SPAN), self._begin_transaction)
        self._plan(self.choose(SPAN // 4), self._begin_wave)
        self._run_agenda()
        self._begin_wave()
        self._run_agenda()

    def _run_agenda(self) -> None:
        while self._agenda:
            self._now, _, action, arguments = heapq.heappop(self._agenda)
            action(*arguments)

    def _plan(self, delay: int, action: Callable[..., None], *arguments: object) -> None:
        self._ticket += 1
        heapq.heappush(self._agenda, (self._now + delay, self._ticket, action, arguments))

    def _append(self, number: int, op: int, gid: str | None, xid: int = 0, lsn: int | None = None) -> tuple[int, int]:
        """Write a record after some foreign WAL; return where the record begins and ends."""
        node = self.nodes[number]
        size = self.choose(12)
        begin = node.end + FOREIGN_SIZES[size % 4]
        end = begin + RECORD_SIZES[size % 3]
        node.end = end
        node.op.append(op)
        node.lsn.append(end if op == MARKER else begin if lsn is None else lsn)
        node.gid.append(gid)
        node.xid.append(xid)
        node.ends.append(end)
        self.story.append((self._now, number, op, gid, begin))
        return begin, end

    def _begin_transaction(self) -> None:
        kind = self.choose(8)
        size = len(self.nodes)
        if kind < 3:
            self._start_parts(self._new_transaction(None), [self.choose(size)])
            return
        first = self.choose(size)
        nodes = [(first + step) % size for step in range(1 + self.choose(size))]
        if kind == 7:  # XA: a second branch of the same global transaction on one node
            nodes.append(nodes[self.choose(len(nodes))])
        self._begin_global(f"{self._label}g{len(self.transactions)}", nodes, tagged=kind == 6)

    def _begin_global(self, gid: str, nodes: list[int], *, tagged: bool) -> None:
        self._start_parts(self._new_transaction(gid), nodes, tagged=tagged)

    def _new_transaction(self, gid: str | None) -> Transaction:
        self.transactions.append(Transaction(len(self.transactions), gid))
        return self.transactions[-1]

    def _start_parts(self, one: Transaction, nodes: list[int], *, tagged: bool = False) -> None:
        for node in nodes:
            one.parts.append(Part(len(self.parts), one, node, has_ddl=self.choose(4) == 3))
            self.parts.append(one.parts[-1])
        one.coordinator = one.parts[0] if tagged else None
        one.waiting = len(one.parts)
        for part in one.parts:
            self._plan(SOON[self.choose(len(SOON))], self._read_and_write, part)

    def _read_and_write(self, part: Part) -> None:
        """Read one row and overwrite one or two; if a row is locked, the whole transaction fails."""
        node, decision = self.nodes[part.node], self.choose(32)
        read, row = decision % ROWS_PER_NODE, decision // 4 % ROWS_PER_NODE
        writes = (row, (row + 1) % ROWS_PER_NODE) if decision // 16 else (row,)
        if any(row in node.locked for row in writes):
            part.transaction.failed = True
            self._finish_part(part.transaction)
            return
        writers = node.writers
        part.saw = frozenset(writers[row][-1] for row in (read, *writes) if writers[row])
        part.writes = writes
        for row in writes:
            node.locked[row] = part.number
        self._plan(SOON[self.choose(len(SOON))], self._commit_or_prepare, part)

    def _commit_or_prepare(self, part: Part) -> None:
        one = part.transaction
        if one.gid is None:
            self._commit(part, None)
            one.fate = "committed"
            return
        if part is not one.coordinator:
            part.lsn, part.end = self._append(part.node, PREPARE, one.gid, part.number)
            self._append_changes(part)
        self._finish_part(one)

    def _finish_part(self, one: Transaction) -> None:
        """Count a part as prepared or failed; after the last one, plan the decision: now, late or never."""
        one.waiting -= 1
        if one.waiting or one.gid is None:
            return
        delay = LATE[self.choose(len(LATE))]
        if delay is not None:
            self._plan(delay, self._decide, one)

    def _decide(self, one: Transaction) -> None:
        is_rolled_back = self.choose(6) == 5 or one.failed
        one.fate = "rolled back" if is_rolled_back else "committed"
        if one.coordinator and is_rolled_back:
            self._release(one.coordinator)
        elif one.coordinator:
            self._commit(one.coordinator, one.gid)
        prepared = [part for part in one.parts if part.lsn is not None and part.commit_lsn is None]
        for part in one.parts:
            if part.lsn is None:
                self._release(part)
        one.waiting = len(prepared)
        for part in prepared:
            delay = LATE[self.choose(len(LATE))]
            if delay is not None:
                self._plan(delay, self._roll_back if is_rolled_back else self._commit_prepared, part)

    def _commit(self, part: Part, gid: str | None) -> None:
        part.lsn, part.end = self._append(part.node, COMMIT, gid, part.number)
        part.commit_lsn = part.lsn
        self._append_changes(part)
        self._make_visible(part)

    def _commit_prepared(self, part: Part) -> None:
        part.commit_lsn, _ = self._append(part.node, COMMIT_PREPARED, part.transaction.gid, part.number)
        self._make_visible(part)

    def _roll_back(self, part: Part) -> None:
        one = part.transaction
        _, part.rollback_end = self._append(part.node, ROLLBACK_PREPARED, one.gid, part.number, part.end)
        self._release(part)
        one.waiting -= 1
        if not one.waiting and self.choose(2):  # the application retries under the same gid
            self.reused_gids += 1
            assert one.gid is not None
            self._begin_global(one.gid, [each.node for each in one.parts], tagged=one.coordinator is not None)

    def _append_changes(self, part: Part) -> None:
        assert part.lsn is not None
        for seq, row in enumerate((*part.writes, APPENDED)):
            self.nodes[part.node].changes.append(Change(part.lsn, seq, row, part.number))

    def _make_visible(self, part: Part) -> None:
        for row in part.writes:
            self.nodes[part.node].writers[row].append(part.number)
        self._release(part)

    def _release(self, part: Part) -> None:
        locked = self.nodes[part.node].locked
        for row in part.writes:
            if locked.get(row) == part.number:
                del locked[row]

    def _begin_wave(self) -> None:
        wave = Wave(catalogs_before=self._ddl_in_catalogs())
        self.waves.append(wave)
        self._waves_left -= 1
        for node in range(len(self.nodes)):
            self._plan(self._marker_delay(), self._write_start, wave, node)

    def _marker_delay(self) -> int:
        return self._marker_delays[self.choose(len(self._marker_delays))]

    def _write_start(self, wave: Wave, node: int) -> None:
        _, wave.starts[node] = self._append(node, MARKER, None)
        for other in self.finish_after(wave, node):
            self._plan(self._marker_delay(), self._write_finish, wave, other)

    def finish_after(self, wave: Wave, node: int) -> list[int]:
        """The nodes whose finish marker is written now that `node` has its start marker."""
        return list(range(len(self.nodes))) if len(wave.starts) == len(self.nodes) else []

    def _write_finish(self, wave: Wave, node: int) -> None:
        _, wave.finishes[node] = self._append(node, MARKER, None)
        wave.reach[node] = REACHES[self.choose(len(REACHES))]
        if len(wave.finishes) == len(self.nodes):
            self._plan(SOON[self.choose(len(SOON))], self._look, wave, self.list_prepared, self.read_catalogs)
            if self._waves_left > 0:
                self._plan(self.choose(SPAN // 4), self._begin_wave)

    def _look(self, wave: Wave, first: Look, then: Look | None) -> None:
        """What is prepared is listed before the catalogs are read for the commit."""
        first(wave)
        if then:
            self._plan(SOON[self.choose(len(SOON))], self._look, wave, then, None)

    def list_prepared(self, wave: Wave) -> None:
        """List what is prepared at this moment."""
        wave.prepared = frozenset(
            part.number
            for part in self.parts
            if part.lsn is not None and part.commit_lsn is None and part.rollback_end is None
        )

    def read_catalogs(self, wave: Wave) -> None:
        """Read the catalogs, as they are committed."""
        wave.catalogs = self._ddl_in_catalogs()

    def _ddl_in_catalogs(self) -> frozenset[int]:
        return frozenset(part.number for part in self.parts if part.has_ddl and part.commit_lsn is not None)
