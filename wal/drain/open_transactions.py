"""The transactions for which an operation waits, and what ends them: those with an id while a slot is being created.

Only transactions that have a transaction id matter, because only they have changed anything. When PostgreSQL creates a
slot, it waits for such transactions in all databases on the server (PostgreSQL manual, "Logical Decoding Concepts";
snapbuild.c).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct
from msgspec.structs import asdict

from cutline.fleet.messages import join_some
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.encodings import readable
from cutline.nodes.problems import comment
from cutline.nodes.synchronous_standbys import AWAITS_STANDBYS, END_STANDBYS_WAIT, SYNC_REP
from cutline.storage.errors import RefusedError

NAMED_MAX = 5
# Gids and role names may belong to another database and be in its encoding. A session no longer has the transaction id
# in COMMIT PREPARED; its query is text of this database's encoding if it is in this database.
PREPARED = f"""
SELECT 'prepared', {readable("gid")}, extract(epoch FROM now() - prepared)::float8,
       '', {readable("owner::text")}, 'prepared', database::text, transaction::text,
       EXISTS (SELECT FROM pg_stat_activity a
                WHERE a.wait_event = '{SYNC_REP}'
                  AND (a.backend_xid = p.transaction
                       OR CASE WHEN a.datname = current_database() AND p.database = current_database()
                               THEN strpos(a.query, quote_literal(p.gid)) > 0 END))
  FROM pg_prepared_xacts p
"""
RUNNING = f"""
SELECT 'process', pid::text, extract(epoch FROM now() - xact_start)::float8,
       coalesce(nullif(application_name, ''), backend_type, ''), coalesce({readable("usename::text")}, ''),
       coalesce(state, ''), coalesce(datname, ''), backend_xid::text, coalesce(wait_event = '{SYNC_REP}', false)
  FROM pg_stat_activity WHERE backend_xid IS NOT NULL
"""
OPEN_QUERY = f"{RUNNING} UNION ALL {PREPARED} ORDER BY 3 DESC NULLS LAST"
PREPARED_QUERY = f"{PREPARED} WHERE database = current_database() ORDER BY 3 DESC"


# Why a server can't export a slot's snapshot ("initial slot snapshot too large", snapbuild.c).
TOO_LARGE = (
    "too many savepoints and transactions for a slot's snapshot are unfinished, or were rolled back since the oldest"
    " running transaction began"
)


class SlotWaitError(RefusedError):
    """A slot could not be created in time because older transactions were still running."""


class SlotSnapshotError(RefusedError):
    """A slot could not be created in time because its snapshot was too large for the server."""


class AwaitedKey(NamedTuple):
    """Identifies one of the transactions that an operation waits for."""

    node: str
    kind: str
    xid: str


class Awaited(Struct, frozen=True):
    """A transaction that an operation waits for. `kind` is process or prepared; `name` is the process id or the gid.

    `age_seconds` is None if the server does not show when the transaction began: pg_stat_activity has no times with
    track_activities off, nor in the moment in which a transaction begins.

    `awaits_standbys`: it has ended, except that its server waits for synchronous standbys. `is_committed_elsewhere`:
    another node has committed its part, so this part must be committed too.
    """

    node: str
    kind: str
    name: str
    age_seconds: float | None
    application: str
    user: str
    state: str
    database: str
    xid: str
    awaits_standbys: bool = False
    is_committed_elsewhere: bool = False

    @property
    def key(self) -> AwaitedKey:
        """The key that identifies the transaction."""
        return AwaitedKey(self.node, self.kind, self.xid)

    def text(self) -> str:
        """Describe the transaction, for messages."""
        age = "of unknown age" if self.age_seconds is None else f"{self.age_seconds:.0f} s old"
        where = f"{age}, of {self.user or 'an unknown user'} in database {self.database}"
        if self.awaits_standbys:
            where += f", {AWAITS_STANDBYS}"
        if self.kind == "prepared":
            return f"node {self.node}: prepared transaction {_literal(self.name)}, {where}"
        application = f", application {self.application}" if self.application else ""
        return f"node {self.node}: process {self.name} ({self.state}{application}), {where}"

    def remedy(self) -> list[str]:
        """Return the statement that ends the transaction, after a comment that says where to run it.

        For most prepared transactions it is unknown whether another node has committed its part; then both statements
        are returned. If it waits for standbys, the statements end the wait.
        """
        if self.awaits_standbys:
            return [
                comment(f"on node {self.node}, to see which standbys are connected:"),
                "SELECT application_name, state, sync_state FROM pg_stat_replication;",
                comment(f"on node {self.node}, to wait for the named standbys only, or for none:"),
                "ALTER SYSTEM SET synchronous_standby_names = '…';",
                "SELECT pg_reload_conf();",
            ]
        if self.kind != "prepared":
            return [comment(f"on node {self.node}:"), f"SELECT pg_terminate_backend({self.name});"]
        commit, rollback = (f"{word} PREPARED {_literal(self.name)};" for word in ("COMMIT", "ROLLBACK"))
        where = f"on node {self.node} in database {self.database}"
        if self.is_committed_elsewhere:
            return [comment(f"{where}:"), commit]
        either = [comment(f"{where}, if another node has committed it:"), commit]
        return [*either, comment("otherwise:"), rollback]

    def details(self) -> dict[str, object]:
        """Return the fields of the transaction, for error details."""
        hidden = ("name", "xid", "awaits_standbys", "is_committed_elsewhere")
        fields = {name: value for name, value in asdict(self).items() if name not in hidden}
        return fields | ({"gid": self.name} if self.kind == "prepared" else {"pid": int(self.name)})


def open_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """Read the transactions with a transaction id in all databases on the server, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(OPEN_QUERY).fetchall()]


def prepared_transactions(node: str, connection: psycopg.Connection[Any]) -> list[Awaited]:
    """Read the prepared transactions in the connection's database, oldest first."""
    return [Awaited(node, *row) for row in connection.execute(PREPARED_QUERY).fetchall()]


def describe_waits(awaited: Iterable[Awaited]) -> str:
    """Describe the first NAMED_MAX transactions, for messages."""
    return join_some((one.text() for one in awaited), NAMED_MAX) or "transactions that the primary does not show"


def report_transactions(notes: WaitNotes, awaited: Collection[Awaited]) -> None:
    """Report the awaited transactions, if there are any and a note is due; other transactions make it due."""
    if awaited:
        notes.report(frozenset(one.key for one in awaited), describe_waits(awaited))


def wait_error(what: str, seconds: float, awaited: list[Awaited], node: str | None = None) -> SlotWaitError:
    """Return the error for a wait that was given up; its hint contains the statements that end the transactions."""
    # Those that wait for the standbys of the same node have the same remedy.
    distinct = dict.fromkeys(tuple(one.remedy()) for one in awaited[:NAMED_MAX])
    remedies = [line for remedy in distinct for line in remedy]
    end = "wait longer (--wait SECONDS), or end these transactions"
    if awaited and all(one.awaits_standbys for one in awaited):
        end = f"these transactions wait for synchronous standbys: {END_STANDBYS_WAIT}, or wait longer (--wait SECONDS)"
    elif awaited and all(one.is_committed_elsewhere for one in awaited):
        end = "another node has committed these transactions: wait longer (--wait SECONDS), or commit them here, too"
    return SlotWaitError(
        f"{what}: gave up after waiting {seconds:.0f} s for {describe_waits(awaited)}",
        hint=[f"{end}:", *remedies] if remedies else "see the server's log, or wait longer: --wait SECONDS",
        details={**({"node": node} if node else {}), "transactions": [one.details() for one in awaited]},
    )


def too_large_error(what: str, seconds: float, oldest: list[Awaited], node: str) -> SlotSnapshotError:
    """Return the error for a slot whose snapshot stayed too large; `oldest` are the running transactions by age."""
    remedies = [line for one in oldest[:1] for line in one.remedy()]
    return SlotSnapshotError(
        f"{what}: gave up after {seconds:.0f} s: {TOO_LARGE}" + (f": {oldest[0].text()}" if oldest else ""),
        hint=[
            "wait longer (--wait SECONDS), repeat the command when fewer transactions use savepoints (EXCEPTION in"
            f" PL/pgSQL, autosave of a driver), or raise max_connections or max_prepared_transactions of node {node}: a"
            " snapshot can name about as many as both allow together",
            *(["or end the oldest transaction:", *remedies] if remedies else []),
        ],
        details={"node": node, "transactions": [one.details() for one in oldest]},
    )


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
