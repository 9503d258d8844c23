"""Running a case's statements and transactions on real shards, and ending the transactions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from tests.fuzz.script import ONE_PHASE, OPEN, THEN, Fate, Statement, Transaction

SESSION = {"client_encoding": "UTF8", "lock_timeout": "50ms", "statement_timeout": "60s"}
# The replication origin of changes, as if a subscription had applied them.
ORIGIN = "fuzz"
# Internal errors of a server, timeouts and broken connections are not refusals of a statement.
FAULTS = ("XX", "57", "53", "58", "08")
ROLLED_BACK = frozenset({Fate.ROLL_BACK, Fate.ROLL_BACK_PREPARED, Fate.HOLD_ROLL_BACK, Fate.NEVER})


@dataclass(frozen=True, slots=True)
class Held:
    """A transaction that is prepared on some shards; it ends once `intervals_left` more intervals have begun."""

    gid: str
    shards: tuple[int, ...]
    is_committing: bool
    intervals_left: int


@dataclass(frozen=True, slots=True)
class Open:
    """A transaction that is open in separate sessions; it ends in the next interval."""

    sessions: tuple[psycopg.Connection[Any], ...]
    is_committing: bool


@dataclass(slots=True)
class Shards:
    """A session on every shard. A statement that PostgreSQL refuses is counted by its SQLSTATE and skipped.

    `last_refusal` is the last error. With `has_origin` all changes have a replication origin.
    """

    dsns: Sequence[str]
    has_origin: bool = False
    refused: Counter[str] = field(default_factory=Counter)
    last_refusal: str = ""
    statements: int = 0
    transactions: int = 0
    held: list[Held] = field(default_factory=list)
    closing: list[Held] = field(default_factory=list)
    open: list[Open] = field(default_factory=list)
    sessions: list[psycopg.Connection[Any]] = field(default_factory=list)

    def __enter__(self) -> Shards:
        self.sessions += [open_session(dsn) for dsn in self.dsns]
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

    def run_interval(self, transactions: Sequence[Transaction]) -> None:
        """Run the transactions in order; those held before end half-way."""
        due = [one for one in self.held if one.intervals_left <= 1]
        self.held = [Held(one.gid, one.shards, one.is_committing, one.intervals_left - 1)
                     for one in self.held if one not in due]  # fmt: skip
        opened, self.open = self.open, []
        half = len(transactions) // 2
        for transaction in transactions[:half]:
            self.run_transaction(transaction)
        self.end(due)
        self.end_open(opened)
        for transaction in transactions[half:]:
            self.run_transaction(transaction)

    def run_transaction(self, transaction: Transaction) -> None:
        self.transactions += 1
        if transaction.fate in OPEN:
            self.leave_open(transaction)
            return
        done = [shard for shard, statements in transaction.parts if self.run_part(shard, statements, transaction)]
        if transaction.fate in ONE_PHASE:
            return
        if transaction.fate is Fate.HALF and transaction.parts[0][0] in done:
            # The COMMIT PREPARED of a part without writes is in no WAL, and would not show that the other half commits.
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
        """Run a transaction in separate sessions, and leave it open."""
        sessions = [open_session(dsn) for dsn in self.dsns]
        own, self.sessions = self.sessions, sessions
        try:
            for shard, statements in transaction.parts:
                self.run_part(shard, statements, transaction)
        finally:
            self.sessions = own
        self.open.append(Open(tuple(sessions), transaction.fate is Fate.OPEN_COMMIT))

    def end_open(self, ended: Sequence[Open]) -> None:
        """Commit or roll back open transactions, and close their sessions; PostgreSQL may refuse a commit."""
        for one in ended:
            for session in one.sessions:
                with session:
                    self.attempt_in(session, "COMMIT" if one.is_committing else "ROLLBACK")

    def run_part(self, shard: int, statements: Sequence[Statement], transaction: Transaction) -> bool:
        """Run one shard's statements; whether its transaction is ready to be prepared, or ended as it should."""
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
        """Run a statement; whether PostgreSQL accepted it."""
        return self.attempt_in(self.sessions[shard], text)

    def attempt_in(self, session: psycopg.Connection[Any], text: str) -> bool:
        """Run a statement in a session; whether PostgreSQL accepted it."""
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
            self.last_refusal = " ".join(str(error).split())
            return False
        return True

    def prepare(self, shard: int, gid: str) -> bool:
        return self.attempt(shard, sql.SQL("PREPARE TRANSACTION {}").format(gid).as_string())

    def end(self, ended: Sequence[Held]) -> None:
        """Commit or roll back prepared transactions on each of their shards."""
        for one in ended:
            for shard in one.shards:
                verb = "COMMIT" if one.is_committing else "ROLLBACK"
                self.attempt(shard, sql.SQL(f"{verb} PREPARED {{}}").format(one.gid).as_string())

    def end_closing(self) -> None:
        """End the transactions that were to be prepared at one increment only."""
        self.end(self.closing)
        self.closing = []

    def end_all(self) -> None:
        self.end_closing()
        self.end(self.held)
        self.end_open(self.open)
        self.held, self.open = [], []


def open_session(dsn: str) -> psycopg.Connection[Any]:
    """A session for a case's statements."""
    session = psycopg.connect(dsn, autocommit=True)
    for name, value in SESSION.items():
        session.execute(f"SET {name} = '{value}'".encode())
    return session


def copy_back(session: psycopg.Connection[Any], out: str, between: str, back: str) -> None:
    """COPY rows out, run the statement between, and COPY the rows in again."""
    with session.cursor().copy(out.encode()) as copy:
        lines = b"".join(bytes(piece) for piece in copy)
    session.execute(between.encode())
    with session.cursor().copy(back.encode()) as copy:
        copy.write(lines)
