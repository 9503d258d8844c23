"""The transactions for which creating a slot, or a chain's first cut, waits; and how they are reported.

Only transactions with a transaction id, which have changed something, are waited for. When PostgreSQL creates a slot,
it waits for those of all databases of the server (PostgreSQL manual, "Logical Decoding Concepts"; snapbuild.c).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Hashable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.messages import join_some
from cutline.fleet.nodes.encodings import readable
from cutline.fleet.nodes.problems import comment
from cutline.fleet.progress import Progress
from cutline.storage.errors import RefusedError

# The first note comes after this time, so that a short wait is not reported.
NOTE_SECONDS = 2.0
# While nothing changes, the note is repeated at this interval.
REPEAT_SECONDS = 30.0
NAMED_MAX = 5
# Gids and role names may come from another database, in the encoding of that one.
PREPARED = f"""
SELECT 'prepared', {readable("gid")}, extract(epoch FROM now() - prepared)::float8,
       '', {readable("owner::text")}, 'prepared', database::text, transaction::text
  FROM pg_prepared_xacts
"""
RUNNING = f"""
SELECT 'process', pid::text, extract(epoch FROM now() - xact_start)::float8,
       coalesce(nullif(application_name, ''), backend_type, ''), coalesce({readable("usename::text")}, ''),
       coalesce(state, ''), coalesce(datname, ''), backend_xid::text
  FROM pg_stat_activity WHERE backend_xid IS NOT NULL
"""
OPEN_QUERY = f"{RUNNING} UNION ALL {PREPARED} ORDER BY 3 DESC"
PREPARED_QUERY = f"{PREPARED} WHERE database = current_database() ORDER BY 3 DESC"


class SlotWaitError(RefusedError):
    """A slot could not be created in time, because older transactions did not end."""


class AwaitedKey(NamedTuple):
    """What identifies a transaction among all that are waited for."""

    node: str
    kind: str
    xid: str


@dataclass(frozen=True, slots=True)
class Awaited:
    """A transaction that is waited for. `kind` is process or prepared; `name` is the process id or the gid.

    `is_committed_elsewhere`: another node has committed its part, so this one must be committed too.
    """

    node: str
    kind: str
    name: str
    age_seconds: float
    application: str
    user: str
    state: str
    database: str
    xid: str
    is_committed_elsewhere: bool = False

    @property
    def key(self) -> AwaitedKey:
        """The key that identifies the transaction."""
        return AwaitedKey(self.node, self.kind, self.xid)

    def text(self) -> str:
        """Describe the transaction, for messages."""
        where = f"{self.age_seconds:.0f} s old, of {self.user or 'an unknown user'} in database {self.database}"
        if self.kind == "prepared":
            return f"node {self.node}: prepared transaction {_literal(self.name)}, {where}"
        application = f", application {self.application}" if self.application else ""
        return f"node {self.node}: process {self.name} ({self.state}{application}), {where}"

    def remedy(self) -> list[str]:
        """The statement that ends the transaction, after a comment that says where to run it.

        Of most prepared ones nobody knows here whether another node has committed its part; both statements are given.
        """
        if self.kind != "prepared":
            return [comment(f"on node {self.node}:"), f"SELECT pg_terminate_backend({self.name});"]
        commit, rollback = (f"{word} PREPARED {_literal(self.name)};" for word in ("COMMIT", "ROLLBACK"))
        where = f"on node {self.node} in database {self.database}"
        if self.is_committed_elsewhere:
            return [comment(f"{where}:"), commit]
        either = [comment(f"{where}, if another node has committed it:"), commit]
        return [*either, comment("otherwise:"), rollback]

    def details(self) -> dict[str, object]:
        """The fields of the transaction, for error details."""
        hidden = ("name", "xid", "is_committed_elsewhere")
        fields = {name: value for name, value in asdict(self).items() if name not in hidden}
        return fields | ({"gid": self.name} if self.kind == "prepared" else {"pid": int(self.name)})


def open_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """Read the transactions of all databases of the server that have a transaction id, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(OPEN_QUERY).fetchall()]


def prepared_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """Read the prepared transactions of the connection's database, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(PREPARED_QUERY).fetchall()]


@dataclass(slots=True)
class WaitNotes:
    """Reports a wait of `what`: first after NOTE_SECONDS, again on every change, and every REPEAT_SECONDS."""

    what: str
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    _reported: Hashable = None
    _reported_at: float = 0.0

    @property
    def waited_seconds(self) -> float:
        """How long the wait has lasted so far."""
        return time.monotonic() - self.began

    def report(self, key: Hashable, text: str) -> None:
        """Note that `what` waits, and for what, if a note is due; with another `key` than the last one has it is."""
        now = time.monotonic()
        if now - self.began < NOTE_SECONDS or (key == self._reported and now - self._reported_at < REPEAT_SECONDS):
            return
        self._reported, self._reported_at = key, now
        self.progress.note(f"{self.what} waits for {text}")

    def report_transactions(self, awaited: Collection[Awaited]) -> None:
        """Report the transactions that are waited for now, if there are any."""
        if awaited:
            self.report(frozenset(one.key for one in awaited), describe_waits(awaited))


def describe_waits(awaited: Iterable[Awaited]) -> str:
    """Describe the first NAMED_MAX transactions, for messages."""
    return join_some((one.text() for one in awaited), NAMED_MAX) or "transactions that its primary does not show"


def wait_error(what: str, seconds: float, awaited: list[Awaited], node: str | None = None) -> SlotWaitError:
    """The error for a wait that is given up; its hint has the statements that end the transactions."""
    remedies = [line for one in awaited[:NAMED_MAX] for line in one.remedy()]
    end = "wait until these transactions end, or wait longer: --wait SECONDS; or end them"
    if awaited and all(one.is_committed_elsewhere for one in awaited):
        end = "another node has committed these transactions: commit them here, too; or wait longer: --wait SECONDS"
    return SlotWaitError(
        f"{what}: gave up after waiting {seconds:.0f} s for {describe_waits(awaited)}",
        hint=[f"{end}:", *remedies] if remedies else "see the server's log, or wait longer: --wait SECONDS",
        details={**({"node": node} if node else {}), "transactions": [one.details() for one in awaited]},
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
