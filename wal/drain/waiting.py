"""While a slot or a chain's first cut is being created, wait for transactions to end and for standbys to replay WAL.

Only transactions that have a transaction id matter, because only they have changed anything. When PostgreSQL creates a
slot, it waits for such transactions in all databases on the server (PostgreSQL manual, "Logical Decoding Concepts";
snapbuild.c).

Replay may be paused or delayed on purpose, held up by a query, or behind because no WAL arrives. The reason is reported
after two seconds. If the wait is given up, the hint contains the statements that would have ended it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import AWAITS_STANDBYS, END_STANDBYS_WAIT, join_some
from cutline.fleet.progress import News, Progress
from cutline.fleet.units import size_text
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.encodings import readable
from cutline.nodes.problems import comment
from cutline.nodes.sessions import in_parallel
from cutline.storage.errors import RefusedError, UnreachableError

# The first note is reported only after this time, so that short waits are not reported.
NOTE_SECONDS = 2.0
# As long as nothing changes, the note is repeated at this interval.
REPEAT_SECONDS = 30.0
NAMED_MAX = 5
# The wait event of a session whose COMMIT, PREPARE or COMMIT PREPARED waits for synchronous standbys.
SYNC_REP = "SyncRep"
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


@dataclass(frozen=True, slots=True)
class Awaited:
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


@dataclass(slots=True)
class WaitNotes:
    """Reports that `what` is waiting: first after NOTE_SECONDS, then on every change and every REPEAT_SECONDS."""

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
        """Report that `what` is waiting, and why, if a note is due; a `key` other than the last note's makes it due."""
        now = time.monotonic()
        if now - self.began < NOTE_SECONDS or (key == self._reported and now - self._reported_at < REPEAT_SECONDS):
            return
        self._reported, self._reported_at = key, now
        self.progress.note(News(f"{self.what} waits for {text}"))

    def report_transactions(self, awaited: Collection[Awaited]) -> None:
        """Report the awaited transactions, if there are any."""
        if awaited:
            self.report(frozenset(one.key for one in awaited), describe_waits(awaited))


def describe_waits(awaited: Iterable[Awaited]) -> str:
    """Describe the first NAMED_MAX transactions, for messages."""
    return join_some((one.text() for one in awaited), NAMED_MAX) or "transactions that the primary does not show"


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


REPLAY_POLL_SECONDS = 0.05
# A task waits no longer than this, because the driver has already waited for the standby.
REPLAYED_SECONDS_MAX = 30.0
STATE_QUERY = """
SELECT pg_is_in_recovery(),
       pg_last_wal_replay_lsn()::text,
       extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8,
       CASE WHEN pg_is_in_recovery() THEN pg_get_wal_replay_pause_state() <> 'not paused' ELSE false END,
       nullif(current_setting('recovery_min_apply_delay'), '0'),
       extract(epoch FROM current_setting('recovery_min_apply_delay')::interval)::float8,
       EXISTS (SELECT FROM pg_stat_wal_receiver),
       coalesce((SELECT concat_ws(' ', wait_event_type, wait_event) FROM pg_stat_activity
                  WHERE backend_type = 'startup'), '')
"""
# The standby was promoted, so it replays no more WAL.
PROMOTED = "promoted"
NOT_RECEIVING = "not receiving"
DELAYED = "Timeout RecoveryApplyDelay"
# The wait events of replay when sessions block it.
CONFLICTS = "IPC RecoveryConflict", "BufferPin", "Lock"
RECEIVER = "SELECT status, latest_end_lsn, pg_last_wal_replay_lsn() FROM pg_stat_wal_receiver;"
CONNINFO = "SHOW primary_conninfo;"
WITHOUT_STANDBYS = (
    "or wait longer: --wait SECONDS; or take a full snapshot without standbys: snapshot create NAME --only-primary"
)


class ReplayLagError(UnreachableError):
    """A standby did not catch up in time with the WAL that the command needs."""


@dataclass(frozen=True, slots=True)
class ReplayState:
    """The state of a standby's replay, which is `behind_bytes` short of the needed position.

    `age_seconds` is the age of the last replayed commit, if any. `why` is the reason: promoted, paused, delayed,
    conflict, not receiving or slow. `delay` is recovery_min_apply_delay, as the server shows it, and in seconds.
    """

    node: str
    replayed: Lsn
    behind_bytes: int
    age_seconds: float | None
    why: str
    delay: str | None
    delay_seconds: float = 0.0

    @property
    def text(self) -> str:
        """How far the standby is behind, and why, for messages."""
        age = f", its last replayed commit is {self.age_seconds:.0f} s old" if self.age_seconds is not None else ""
        return f"standby {self.node} is {size_text(self.behind_bytes)} behind{age}: {self._reason}"

    @property
    def _reason(self) -> str:
        return {
            "promoted": "it is no longer a standby",
            "paused": "its replay is paused",
            "delayed": f"its recovery_min_apply_delay is {self.delay}",
            "conflict": "a session on it blocks its replay",
            NOT_RECEIVING: "it receives no WAL",
        }.get(self.why, "it has not caught up yet")

    @property
    def remedies(self) -> list[str]:
        """The statements that end the wait, as lines of a hint."""
        on = f"on node {self.node}"
        lines = {
            PROMOTED: ["correct its backup_of in fleet.toml"],
            "paused": [
                comment(f"{on}, unless its log says that the server paused replay because of a setting:"),
                "SELECT pg_wal_replay_resume();",
            ],
            "delayed": [
                comment(f"{on}, if the delay is not needed:"),
                "ALTER SYSTEM SET recovery_min_apply_delay = 0;",
                "SELECT pg_reload_conf();",
            ],
            "conflict": [
                comment(f"{on}, to see the sessions; pg_terminate_backend(pid) ends a session:"),
                "SELECT pid, usename, xact_start, query FROM pg_stat_activity WHERE xact_start IS NOT NULL;",
            ],
            NOT_RECEIVING: [comment(f"{on}, to check that this is its primary; check its log, too:"), CONNINFO],
        }.get(self.why, [comment(f"{on}, to see its progress:"), RECEIVER])
        return [*lines, WITHOUT_STANDBYS]


def read_replay(node: str, connection: psycopg.Connection[Any], needed: Lsn) -> ReplayState | None:
    """Return the state of the standby's replay; None once it has replayed everything up to `needed`."""
    state = replay_state(node, connection, needed)
    return state if state.replayed < needed else None


def replay_state(node: str, connection: psycopg.Connection[Any], needed: Lsn) -> ReplayState:
    """Return the state of the standby's replay, also if it has replayed everything up to `needed`."""
    row = connection.execute(STATE_QUERY).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    recovers, position, age_seconds, is_paused, delay, delay_seconds, receives, waits_for = row
    replayed = Lsn.parse(position or "0/0")
    if not recovers:
        why = PROMOTED
    elif is_paused:
        why = "paused"
    elif waits_for == DELAYED:
        why = "delayed"
    elif waits_for.startswith(CONFLICTS):
        why = "conflict"
    elif not receives:
        why = NOT_RECEIVING
    else:
        why = "delayed" if delay else "slow"
    return ReplayState(node, replayed, max(needed - replayed, 0), age_seconds, why, delay, delay_seconds)


def replay_error(state: ReplayState, what: str, seconds: float) -> ReplayLagError:
    """Return the error for `what`, which gave up waiting for a standby."""
    return ReplayLagError(
        f"{what}: gave up after waiting {seconds:.0f} s: {state.text}",
        hint=state.remedies,
        details={**asdict(state), "replayed": str(state.replayed)},
    )


def report_replay(notes: WaitNotes, state: ReplayState, seconds_max: float) -> None:
    """Report the wait for a standby (at most `seconds_max`) if a note is due; a new cause makes it due."""
    notes.report(state.why, f"up to {seconds_max:.0f} s: {state.text}")


def await_standbys(
    standbys: Collection[Node], needed: Mapping[str, Lsn], seconds_max: float, progress: Progress, what: str
) -> None:
    """Wait at most `seconds_max` until each standby has replayed up to its shard's position in `needed`.

    `what` names the waiting operation in messages. Raises ReplayLagError and NodeUnreachableError.
    """
    is_over = threading.Event()
    began = time.monotonic()

    def wait(node: Node) -> None:
        notes = WaitNotes(what, progress, began)
        with raising_unreachable(node), connect(node) as connection:
            while state := read_replay(node.id, connection, needed[node.shard]):
                waited = time.monotonic() - began
                if waited > seconds_max or state.why == PROMOTED:
                    raise replay_error(state, what, waited)
                report_replay(notes, state, seconds_max)
                if is_over.wait(REPLAY_POLL_SECONDS):
                    return

    in_parallel(wait, standbys, is_over.set)


def check_replayed(connection: psycopg.Connection[Any], node: Node, needed: Lsn) -> None:
    """Raise ReplayLagError unless the standby replays everything up to `needed` within REPLAYED_SECONDS_MAX."""
    deadline = time.monotonic() + REPLAYED_SECONDS_MAX
    while state := read_replay(node.id, connection, needed):
        if time.monotonic() > deadline:
            raise replay_error(state, f"node {node.id}", REPLAYED_SECONDS_MAX)
        time.sleep(REPLAY_POLL_SECONDS)
