"""A client that writes one causal chain, link by link, and keeps a journal of the server's answers.

A link is a local transaction (its parent) and then a two-phase transaction (child and twin). The client commits the
two-phase transaction on its shards in any order and with any delay, rolls it back, or holds it: either on both shards,
so that the chain waits for it, or committed on one shard only, where the chain continues. In some of these
transactions, the first shard commits its part in one phase, like a coordinator that tags it with the gid of the other
part. On a shard, the client never refers to a row that is not committed there. Trimming deletes the oldest link on both
its shards, also in a two-phase transaction.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg

from tests.causal.journal import Transaction

GID_PREFIX = "chain-"
IDS_PER_CHAIN = 1_000_000
LINKS_KEPT = 6
DELAY_SECONDS_MAX = 0.3
CUTS_HELD = (2, 6)

PARENT = "INSERT INTO parent (id, chain, link, {column}) VALUES (%(id)s, %(chain)s, %(link)s, %(before)s)"
CHILD = "INSERT INTO child VALUES (%(id)s, %(chain)s, %(link)s, %(parent)s, %(twin_shard)s)"
TWIN = "INSERT INTO twin VALUES (%(id)s, %(chain)s, %(link)s, %(child_shard)s)"
DELETE_CHILD = "DELETE FROM child WHERE id = %(id)s; DELETE FROM parent WHERE id = %(parent)s"
DELETE_TWIN = "DELETE FROM twin WHERE id = %(id)s"
# Written by a part that is committed in one phase; it names the gid of the prepared parts.
TAG = "SELECT pg_logical_emit_message(true, 'snapshot.gid', %(gid)s)"
TAGGED_RATIO = 0.25

# The fates of a prepared transaction, and how often each is drawn while transactions may be held.
COMMIT, ROLL_BACK, HOLD, HOLD_THEN_ROLL_BACK, HALF = "commit", "roll back", "hold", "hold, roll back", "half"
WEIGHTS = {COMMIT: 76, ROLL_BACK: 12, HOLD: 3, HOLD_THEN_ROLL_BACK: 3, HALF: 6}


@dataclass(slots=True)
class Calendar:
    """The number of increments so far, and whether the clients may hold transactions."""

    cuts: int = 0
    may_hold: bool = False


@dataclass(slots=True, eq=False)
class TwoPhase:
    """A prepared transaction: the shards still to decide, in order, and when the next decision is due.

    `coordinator` is the shard, if any, on which the transaction is not prepared but still open in the client's session.
    """

    transaction: Transaction
    remaining: list[int]
    is_committing: bool
    coordinator: int | None
    due_cut: int = 0
    due_time: float = 0.0

    def is_due(self, calendar: Calendar) -> bool:
        return calendar.cuts >= self.due_cut and time.monotonic() >= self.due_time

    @property
    def is_undecided(self) -> bool:
        return len(self.remaining) == len(self.transaction.shards)

    def decision(self) -> str:
        """Return the statement for the next shard."""
        verb = "COMMIT" if self.is_committing else "ROLLBACK"
        return verb if self.remaining[0] == self.coordinator else f"{verb} PREPARED %(gid)s"


@dataclass(frozen=True, slots=True)
class Link:
    """One link; `row` contains the parameters of its statements."""

    number: int
    row: Mapping[str, int]
    two_phase: TwoPhase

    def committed_on(self) -> list[int]:
        return sorted({self.row["child_shard"], self.row["twin_shard"]} - set(self.two_phase.remaining))


@dataclass(slots=True)
class ChainClient:
    """Writes chain `number` in its sessions on all shards, in one thread. The first fates are `fates`, in order."""

    sessions: Sequence[psycopg.Connection[Any]]
    number: int
    chance: random.Random
    calendar: Calendar
    fates: list[str] = field(default_factory=list)
    journal: list[Transaction] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)
    _open: list[TwoPhase] = field(default_factory=list)
    _next_link: Link | None = None
    _parent: Mapping[str, int] | None = None
    _trimming: TwoPhase | None = None
    _ids: int = 0

    def step(self) -> None:
        """Send the decisions that are due, then trim or extend the chain unless its next link is held."""
        for one in [one for one in self._open if one.is_due(self.calendar)]:
            self._decide(one)
        is_long = len(self.links) > LINKS_KEPT and not self.links[0].two_phase.remaining
        if is_long and self._trimming is None and self.chance.random() < 0.3:
            self.trim()
        elif self._next_link is None:
            self.grow()

    def decide_all(self) -> None:
        while self._open:
            self._decide(self._open[0])

    def grow(self) -> None:
        """Write the next link's parent if it does not exist, and prepare child and twin."""
        parent = self._parent or self._insert_parent()
        self._parent = parent
        here = parent["shard"]
        there = (here + self.chance.randrange(1, len(self.sessions))) % len(self.sessions)
        row = {**self._new_ids(parent["link"]), "parent": parent["id"], "child_shard": here, "twin_shard": there}
        inserts = (("child", here, row["id"]), ("twin", there, row["id"]))
        transaction = Transaction(f"{GID_PREFIX}{row['id']}", inserts, (), (here, there))
        fate = self._choose_fate()
        one = self._prepare(transaction, {here: CHILD, there: TWIN}, row, fate)
        self._next_link = Link(parent["link"], row, one)
        self._plan_decision(one, fate)

    def trim(self) -> None:
        """Delete the oldest link; foreign keys set references to the link to null."""
        row = self.links[0].row
        here, there = row["child_shard"], row["twin_shard"]
        deletes = (("child", here, row["id"]), ("parent", here, row["parent"]), ("twin", there, row["id"]))
        gid = f"{GID_PREFIX}{self._new_ids(0)['id']}-trim"
        transaction = Transaction(gid, (), deletes, (here, there))
        fate = self._choose_fate()
        self._trimming = self._prepare(transaction, {here: DELETE_CHILD, there: DELETE_TWIN}, row, fate)
        self._plan_decision(self._trimming, fate)

    def _new_ids(self, link: int) -> dict[str, int]:
        self._ids += 1
        return {"id": self.number * IDS_PER_CHAIN + self._ids, "chain": self.number, "link": link}

    def _insert_parent(self) -> Mapping[str, int]:
        """Insert the parent on a shard where the last link is committed, so that it can refer to that link."""
        if not self.links:
            here, column, before = self.chance.randrange(len(self.sessions)), "prev_child", None
            row = self._new_ids(1)
        else:
            last = self.links[-1]
            here = self.chance.choice(last.committed_on())
            column = "prev_child" if here == last.row["child_shard"] else "prev_twin"
            before = last.row["id"]
            row = self._new_ids(last.number + 1)
        transaction = Transaction(inserts=(("parent", here, row["id"]),), shards=(here,))
        self.journal.append(transaction)
        transaction.sent = transaction.decided = transaction.last_sent = time.monotonic()
        self.sessions[here].execute(PARENT.format(column=column).encode(), {**row, "before": before})
        transaction.acknowledged = time.monotonic()
        return {**row, "shard": here}

    def _prepare(
        self, transaction: Transaction, statements: Mapping[int, str], row: Mapping[str, int], fate: str
    ) -> TwoPhase:
        """Execute and prepare the transaction on every shard; a coordinator's part stays open and is decided first."""
        self.journal.append(transaction)
        shards = self.chance.sample(transaction.shards, len(transaction.shards))
        order = self.chance.sample(shards, len(shards))
        can_be_tagged = fate not in (HOLD, HOLD_THEN_ROLL_BACK)
        coordinator = order[0] if can_be_tagged and self.chance.random() < TAGGED_RATIO else None
        for shard in shards:
            ending = TAG if shard == coordinator else "PREPARE TRANSACTION %(gid)s"
            statement = f"BEGIN; {statements[shard]}; {ending}"
            self.sessions[shard].execute(statement.encode(), {**row, "gid": transaction.gid})
        one = TwoPhase(transaction, order, fate not in (ROLL_BACK, HOLD_THEN_ROLL_BACK), coordinator)
        transaction.is_tagged = coordinator is not None
        if not transaction.is_tagged:
            transaction.prepared = time.monotonic()
        self._open.append(one)
        return one

    def _choose_fate(self) -> str:
        if self.fates and self.calendar.may_hold:
            return self.fates.pop(0)
        fate = self.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        return fate if fate in (COMMIT, ROLL_BACK) or self.calendar.may_hold else COMMIT

    def _plan_decision(self, one: TwoPhase, fate: str) -> None:
        if fate in (HOLD, HOLD_THEN_ROLL_BACK):
            self._hold(one)
        elif fate == HALF:
            self._decide_next(one)
            self._hold(one)
        elif one.coordinator is not None:
            # The client's next statement on this shard needs the session.
            self._decide(one)
        else:
            one.due_time = time.monotonic() + self._draw_delay()

    def _hold(self, one: TwoPhase) -> None:
        one.due_cut = self.calendar.cuts + self.chance.randint(*CUTS_HELD)

    def _draw_delay(self) -> float:
        """Draw a delay: mostly short, rarely near the maximum."""
        return DELAY_SECONDS_MAX * float(self.chance.random() ** 4)

    def _decide(self, one: TwoPhase) -> None:
        """Decide on the next shard. The chain continues before a delayed commit on the other shard."""
        self._decide_next(one)
        if one.remaining and not one.is_committing:
            self._decide_next(one)
        one.due_time = time.monotonic() + self._draw_delay()
        one.due_cut = 0

    def _decide_next(self, one: TwoPhase) -> None:
        transaction, is_first = one.transaction, one.is_undecided
        statement = one.decision()
        now = time.monotonic()
        transaction.decided = now if is_first else transaction.decided
        if one.is_committing:
            transaction.sent = now if is_first else transaction.sent
            transaction.last_sent = now if len(one.remaining) == 1 else transaction.last_sent
        self.sessions[one.remaining[0]].execute(statement.encode(), {"gid": transaction.gid})
        if one.is_committing and is_first:
            transaction.acknowledged = time.monotonic()
        del one.remaining[0]
        if is_first:
            self._note_decided(one)
        if not one.remaining:
            self._open.remove(one)
            self._trimming = None if one is self._trimming else self._trimming

    def _note_decided(self, one: TwoPhase) -> None:
        if self._next_link is not None and one is self._next_link.two_phase:
            if one.is_committing:
                self.links.append(self._next_link)
                self._parent = None
            self._next_link = None
        elif one.is_committing:
            del self.links[0]
