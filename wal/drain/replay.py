"""Wait for standbys to replay WAL, and name what holds them up.

Replay may be paused or delayed on purpose, held up by a query, or behind because no WAL arrives. The reason is reported
after two seconds. If the wait is given up, the hint contains the statements that would have ended it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Container, Mapping
from types import MappingProxyType
from typing import Any

import psycopg
from msgspec import Struct
from msgspec.structs import asdict

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.fleet.units import size_text
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import connect, raising_unreachable
from cutline.nodes.problems import comment
from cutline.nodes.sessions import in_parallel
from cutline.storage.errors import UnreachableError

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
    """A standby did not catch up in time with the WAL that the command needs.

    `late` has the errors of all standbys that were late at the same time, by node, as far as they are known.
    """

    late: Mapping[str, ReplayLagError] = MappingProxyType({})


class ReplayState(Struct, frozen=True):
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

    def is_hopeless(self, wait_seconds: float) -> bool:
        """Whether waiting is in vain: replay is paused, or delayed by more than the wait."""
        return self.why == "paused" or (self.why == "delayed" and self.delay_seconds > wait_seconds)

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
    standbys: Collection[Node],
    needed: Mapping[str, Lsn],
    seconds_max: float,
    progress: Progress,
    what: str,
    spared: Container[str] = (),
) -> None:
    """Wait at most `seconds_max` until each standby has replayed up to its shard's position in `needed`.

    The caller can do without those in `spared`: it is not waited for one whose replay is paused, or delayed by more
    than the wait. `what` names the waiting operation in messages. Raises NodeUnreachableError, and one ReplayLagError
    for all standbys that are late, whose `late` has the error of each by node.
    """
    is_over = threading.Event()
    began = time.monotonic()

    def wait(node: Node) -> ReplayLagError | None:
        notes = WaitNotes(what, progress, began)
        with raising_unreachable(node), connect(node) as connection:
            while state := read_replay(node.id, connection, needed[node.shard]):
                waited = time.monotonic() - began
                is_in_vain = node.id in spared and state.is_hopeless(seconds_max)
                if waited > seconds_max or state.why == PROMOTED or is_in_vain:
                    return replay_error(state, what, waited)
                report_replay(notes, state, seconds_max)
                if is_over.wait(REPLAY_POLL_SECONDS):
                    break
        return None

    errors = [error for error in in_parallel(wait, standbys, is_over.set) if error is not None]
    if errors:
        errors[0].late = {str(error.details["node"]): error for error in errors}
        raise errors[0]


def check_replayed(connection: psycopg.Connection[Any], node: Node, needed: Lsn) -> None:
    """Raise ReplayLagError unless the standby replays everything up to `needed` within REPLAYED_SECONDS_MAX."""
    deadline = time.monotonic() + REPLAYED_SECONDS_MAX
    while state := read_replay(node.id, connection, needed):
        if time.monotonic() > deadline:
            raise replay_error(state, f"node {node.id}", REPLAYED_SECONDS_MAX)
        time.sleep(REPLAY_POLL_SECONDS)
