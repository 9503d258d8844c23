"""Doing on two real shards what a case says: its statements, transactions, and how those end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from tests.fuzz.script import ONE_PHASE, OPEN, THEN, Fate, Statement, Transaction

SESSION = {"client_encoding": "UTF8", "lock_timeout": "50ms", "statement_timeout": "60s"}
# Where changes come from that a subscription would have brought.
ORIGIN = "fuzz"
# A server's own faults, what ran too long, and connections that broke are no answers to a statement.
FAULTS = ("XX", "57", "53", "58", "08")
ROLLED_BACK = frozenset({Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_ROLL_BACK, Fate.NEVER})


@dataclass(frozen=True, slots=True)
class Held:
    """A transaction that is prepared on some shards; it is ended once `intervals_left` have begun."""

    gid: str
    shards: tuple[int, ...]
    is_committing: bool
    intervals_left: int


@dataclass(frozen=True, slots=True)
class Open:
    """A transaction that is open in sessions of its own; it is ended in the interval that comes."""

    sessions: tuple[psycopg.Connection[Any], ...]
    is_committing: bool


@dataclass(slots=True)
class Shards:
    """A session on every shard. What PostgreSQL refuses is counted by its SQLSTATE and passed over.

    `answer` is what it said last. With `has_origin` all changes come from elsewhere.
    """

    dsns: Sequence[str]
    has_origin: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    answer: str = ""
    statements: int = 0
    transactions: int = 0
    held: list[Held] = field(default_factory=list)
    closing: list[Held] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    sessions: list[psycopg.Connection[Any]] = field(default_factory=list)

    def __enter__(self) -> Shards:
        self.sessions += [connected(dsn) for dsn in self.dsns]
        if self.has_origin:
            for session in self.sessions:
                session.execute("SELECT pg_replication_origin_session_setup(%s)", (ORIGIN,))
        return self

    def __exit__(self, *_: object) -> None:
        for session in [*self.sessions, *(session for one in self.open for session in one.sessions)]:
            session.close()

    @property
    def is_holding(self) -> bool:
        """Whether any transaction is neither committed nor rolled back."""
        return bool(self.held or self.closing or self.open)

    def interval(self, transactions: Sequence[Transaction]) -> None:
        """Run them in order; those held before are ended half-way."""
        due = [one for one in self.held if one.intervals_left <= 1]
        self.held = [Held(one.gid, one.shards, one.is_committing, one.intervals_left - 1)
                     for one in self.held if one not in due]  # fmt: skip
        opened, self.open = self.open, []
        half = len(transactions) // 2
        for transaction in transactions[:half]:
            self.transaction(transaction)
        self.end(due)
        self.end_open(opened)
        for transaction in transactions[half:]:
            self.transaction(transaction)

    def transaction(self, transaction: Transaction) -> None:
        self.transactions += 1
        if transaction.fate in OPEN:
            self.leave_open(transaction)
            return
        done = [shard for shard, statements in transaction.parts if self.part(shard, statements, transaction)]
        if transaction.fate in ONE_PHASE:
            return
        if transaction.fate is Fate.HALF and transaction.parts[0][0] in done:
            # A COMMIT PREPARED of what wrote nothing is in no WAL, and says nothing of the other half.
            self.sessions[done[0]].execute("SELECT pg_logical_emit_message(true, 'others', 'half')")
        gid = f"fuzz '{self.transactions}"
        if len(done) < len(transaction.parts) or not all([self.prepare(shard, gid) for shard in done]):
            for shard in done:
                self.sessions[shard].execute("ROLLBACK")
            self.end([Held(gid, tuple(done), is_committing=False, intervals_left=0)])
            return
        held = Held(gid, tuple(done), transaction.fate not in ROLLED_BACK, 1)
        match transaction.fate:
            case Fate.COMMIT_PREPARED | Fate.ROLL_BACK_PREPARED:
                self.end([held])
            case Fate.HOLD_LONG_COMMIT:
                self.held.append(Held(gid, held.shards, held.is_committing, 2))
            case Fate.HOLD_COMMIT | Fate.HOLD_ROLL_BACK:
                self.held.append(held)
            case Fate.HALF:
                self.end([Held(gid, held.shards[:1], held.is_committing, 0)])
                self.closing.append(Held(gid, held.shards[1:], held.is_committing, 0))
            case Fate.NEVER:
                self.closing.append(held)

    def leave_open(self, transaction: Transaction) -> None:
        """Run it in sessions of its own, and leave it open."""
        sessions = [connected(dsn) for dsn in self.dsns]
        own, self.sessions = self.sessions, sessions
        try:
            for shard, statements in transaction.parts:
                self.part(shard, statements, transaction)
        finally:
            self.sessions = own
        self.open.append(Open(tuple(sessions), transaction.fate is Fate.OPEN_COMMIT))

    def end_open(self, ended: Sequence[Open]) -> None:
        """Commit what is open or roll it back, and close its sessions; PostgreSQL may refuse to commit it."""
        for one in ended:
            for session in one.sessions:
                with session:
                    self.answered(session, "COMMIT" if one.is_committing else "ROLLBACK")

    def part(self, shard: int, statements: Sequence[Statement], transaction: Transaction) -> bool:
        """Run one shard's statements; whether its transaction is open, to be prepared, or was ended as it should be."""
        session = self.sessions[shard]
        if transaction.fate is Fate.BARE:
            return all([self.attempt(shard, statement.sql) for statement in statements])
        session.execute("BEGIN")
        for statement in statements:
            has_savepoint = transaction.has_savepoints or statement.is_undone
            if has_savepoint:
                session.execute("SAVEPOINT one")
            is_done = self.attempt(shard, statement.sql)
            if not is_done and not has_savepoint:
                session.execute("ROLLBACK")
                return False
            if has_savepoint:
                session.execute(b"RELEASE one" if is_done and not statement.is_undone else b"ROLLBACK TO one")
        if transaction.fate in ONE_PHASE:
            self.attempt(shard, "COMMIT" if transaction.fate is Fate.COMMIT else "ROLLBACK")
        return True

    def attempt(self, shard: int, text: str) -> bool:
        """Run a statement; whether PostgreSQL did it."""
        return self.answered(self.sessions[shard], text)

    def answered(self, session: psycopg.Connection[Any], text: str) -> bool:
        """Run a statement in that session; whether PostgreSQL did it."""
        self.statements += 1
        try:
            if THEN in text:
                copy_back(session, *text.split(THEN))
            else:
                session.execute(text.encode())
        except psycopg.Error as error:
            state = error.sqlstate or "08"
            if state.startswith(FAULTS):
                raise
            self.refused[state] += 1
            self.answer = " ".join(str(error).split())
            return False
        return True

    def prepare(self, shard: int, gid: str) -> bool:
        return self.attempt(shard, sql.SQL("PREPARE TRANSACTION {}").format(gid).as_string())

    def end(self, ended: Sequence[Held]) -> None:
        """Commit or roll back what is prepared, on each of its shards where it is."""
        for one in ended:
            for shard in one.shards:
                verb = "COMMIT" if one.is_committing else "ROLLBACK"
                self.attempt(shard, sql.SQL(f"{verb} PREPARED {{}}").format(one.gid).as_string())

    def close_halves(self) -> None:
        """End what was to be open at one increment only."""
        self.end(self.closing)
        self.closing = []

    def end_all(self) -> None:
        self.close_halves()
        self.end(self.held)
        self.end_open(self.open)
        self.held, self.open = [], []


def connected(dsn: str) -> psycopg.Connection[Any]:
    """A session for a case's statements."""
    session = psycopg.connect(dsn, autocommit=True)
    for name, value in SESSION.items():
        session.execute(f"SET {name} = '{value}'".encode())
    return session


def copy_back(session: psycopg.Connection[Any], out: str, between: str, back: str) -> None:
    """COPY something out, run what is between, and COPY it in again."""
    with session.cursor().copy(out.encode()) as copy:
        lines = b"".join(bytes(piece) for piece in copy)
    session.execute(between.encode())
    with session.cursor().copy(back.encode()) as copy:
        copy.write(lines)
