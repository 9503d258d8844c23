"""What a slot or a first cut waits for: transactions that are older than it, and how a person is told of them.

Only transactions that have changed something (that have a transaction id) are waited for. PostgreSQL waits for those
of all databases of the server when it makes a slot (PostgreSQL manual, "Logical Decoding Concepts"; snapbuild.c).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import psycopg

from fleet.nodes.encodings import readable
from fleet.progress import Progress
from storage.errors import RefusedError

# The first note comes after this, so that an ordinary moment's wait says nothing.
NOTE_SECONDS = 2.0
# As long as nothing changes, it is repeated this seldom.
REPEAT_SECONDS = 30.0
NAMED_MAX = 5
# A gid may be another database's, in that one's encoding, and so may a role's name.
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
    """A slot could not be made in time, because transactions older than it did not end."""


@dataclass(frozen=True, slots=True)
class Awaited:
    """A transaction that is waited for. `kind` is process or prepared; `name` is the process id or the gid."""

    node: str
    kind: str
    name: str
    age_seconds: float
    application: str
    user: str
    state: str
    database: str
    xid: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What tells it from every other one."""
        return self.node, self.kind, self.xid

    def text(self) -> str:
        """The transaction, for a message."""
        where = f"{self.age_seconds:.0f} s old, of {self.user or 'an unknown user'} in database {self.database}"
        if self.kind == "prepared":
            return f"node {self.node}: prepared transaction {_literal(self.name)}, {where}"
        application = f", application {self.application}" if self.application else ""
        return f"node {self.node}: process {self.name} ({self.state}{application}), {where}"

    def remedy(self) -> str:
        """The statement that ends it."""
        if self.kind == "prepared":
            return f"on node {self.node} in database {self.database}: ROLLBACK PREPARED {_literal(self.name)};"
        return f"on node {self.node}: SELECT pg_terminate_backend({self.name});"

    def details(self) -> dict[str, object]:
        """The same, field by field."""
        found = {name: value for name, value in asdict(self).items() if name not in ("name", "xid")}
        return {**found, "gid" if self.kind == "prepared" else "pid": _number_waits(self)}


def open_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """The transactions on the server, of all its databases, that have changed something, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(OPEN_QUERY).fetchall()]


def prepared_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """The transactions that are prepared in the connection's database, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(PREPARED_QUERY).fetchall()]


@dataclass(slots=True)
class WaitNotes:
    """Says what is waited for: once it takes long, again whenever that changes, and now and then while it does not."""

    what: str
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    _told: frozenset[tuple[str, str, str]] | None = None
    _told_at: float = 0.0

    @property
    def waited_seconds(self) -> float:
        """How long the wait has taken so far."""
        return time.monotonic() - self.began

    def tell(self, awaited: Iterable[Awaited]) -> None:
        """Note what is waited for now, if it is time to."""
        found = list(awaited)
        keys = frozenset(one.key for one in found)
        now = time.monotonic()
        if now - self.began < NOTE_SECONDS or not found:
            return
        if keys == self._told and now - self._told_at < REPEAT_SECONDS:
            return
        self._told, self._told_at = keys, now
        self.progress.note(f"{self.what} waits for {describe_waits(found)}")


def describe_waits(awaited: list[Awaited]) -> str:
    """The first few of them, for a message."""
    more = [f"and {len(awaited) - NAMED_MAX} more"] if len(awaited) > NAMED_MAX else []
    return "; ".join([*(one.text() for one in awaited[:NAMED_MAX]), *more]) or "nothing that its primary shows"


def wait_error(what: str, seconds: float, awaited: list[Awaited], node: str | None = None) -> SlotWaitError:
    """The error for a wait that is given up, with what ends each transaction as its hint."""
    remedies = [one.remedy() for one in awaited[:NAMED_MAX]]
    return SlotWaitError(
        f"{what}: given up after {seconds:.0f} s of waiting for {describe_waits(awaited)}",
        hint="\n".join(["wait until they end, or give them more time: --wait SECONDS; or end them:", *remedies])
        if remedies
        else "see the server's log; or give it more time: --wait SECONDS",
        details={**({"node": node} if node else {}), "transactions": [one.details() for one in awaited]},
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _number_waits(awaited: Awaited) -> object:
    return awaited.name if awaited.kind == "prepared" else int(awaited.name)
