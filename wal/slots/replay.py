"""Waiting for standbys: a standby's slot yields only WAL that the standby has replayed, and is made only from such WAL.

Replay may be paused or delayed on purpose, held up by a query, or behind because nothing arrives. Which of these it is
is said after two seconds, with what ends it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import psycopg

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.nodes.connections import connect, raising_unreachable
from cutline.fleet.nodes.problems import comment
from cutline.fleet.nodes.sessions import in_parallel
from cutline.fleet.progress import Progress
from cutline.fleet.units import size_text
from cutline.storage.errors import UnreachableError
from cutline.wal.slots.waiting import WaitNotes

REPLAY_POLL_SECONDS = 0.05
# A task waits no longer: the driver has waited for the standby before.
REPLAYED_SECONDS_MAX = 30.0
STATE_QUERY = """
SELECT pg_is_in_recovery(),
       pg_last_wal_replay_lsn()::text,
       extract(epoch FROM clock_timestamp() - pg_last_xact_replay_timestamp())::float8,
       CASE WHEN pg_is_in_recovery() THEN pg_get_wal_replay_pause_state() <> 'not paused' ELSE false END,
       nullif(current_setting('recovery_min_apply_delay'), '0'),
       EXISTS (SELECT FROM pg_stat_wal_receiver),
       coalesce((SELECT concat_ws(' ', wait_event_type, wait_event) FROM pg_stat_activity
                  WHERE backend_type = 'startup'), '')
"""
# It replays nothing more.
PROMOTED = "promoted"
DELAYED = "Timeout RecoveryApplyDelay"
# What the process that replays waits for if sessions are in its way.
CONFLICTS = "IPC RecoveryConflict", "BufferPin", "Lock"
RECEIVER = "SELECT status, latest_end_lsn, pg_last_wal_replay_lsn() FROM pg_stat_wal_receiver;"
CONNINFO = "SHOW primary_conninfo;"
WITHOUT_STANDBYS = (
    "or wait longer: --wait SECONDS; or take a full snapshot without standbys: snapshot create NAME --only-primary"
)


class ReplayLagError(UnreachableError):
    """A standby did not replay, in time, the WAL that the command needs."""


@dataclass(frozen=True, slots=True)
class ReplayState:
    """What a standby says of its replay, which is `behind_bytes` before the WAL that is waited for.

    `age_seconds` is that of the last commit that it has replayed, if there was any. `why` it is behind is one of:
    promoted, paused, delayed, conflict, not receiving, slow. `delay` is recovery_min_apply_delay, as the server shows
    it.
    """

    node: str
    replayed: Lsn
    behind_bytes: int
    age_seconds: float | None
    why: str
    delay: str | None

    @property
    def text(self) -> str:
        """By how much it is behind, and why, for messages."""
        age = f", its last commit is {self.age_seconds:.0f} s old" if self.age_seconds is not None else ""
        return f"standby {self.node} is {size_text(self.behind_bytes)} behind{age}: {self._reason}"

    @property
    def _reason(self) -> str:
        return {
            "promoted": "it is no standby any more",
            "paused": "its replay is paused",
            "delayed": f"its recovery_min_apply_delay is {self.delay}",
            "conflict": "a session on it is in the way of its replay",
            "not receiving": "it receives no WAL",
        }.get(self.why, "it has not replayed more yet")

    @property
    def remedies(self) -> list[str]:
        """What ends it, as lines of a hint."""
        on = f"on node {self.node}"
        lines = {
            PROMOTED: ["correct its backup_of in fleet.toml"],
            "paused": [
                comment(f"{on}, if its log does not say that the server paused it because of a setting:"),
                "SELECT pg_wal_replay_resume();",
            ],
            "delayed": [
                comment(f"{on}, if it need not be late:"),
                "ALTER SYSTEM SET recovery_min_apply_delay = 0;",
                "SELECT pg_reload_conf();",
            ],
            "conflict": [
                comment(f"{on}, to see which sessions; pg_terminate_backend(pid) ends one:"),
                "SELECT pid, usename, xact_start, query FROM pg_stat_activity WHERE xact_start IS NOT NULL;",
            ],
            "not receiving": [comment(f"{on}, to see whether it leads to its primary; see its log, too:"), CONNINFO],
        }.get(self.why, [comment(f"{on}, to see how far it gets:"), RECEIVER])
        return [*lines, WITHOUT_STANDBYS]


def read_replay(node: str, connection: psycopg.Connection[Any], needed: Lsn) -> ReplayState | None:
    """The state of the standby's replay; None once it has replayed everything up to `needed`."""
    row = connection.execute(STATE_QUERY).fetchone()
    if row is None:
        raise RuntimeError("a query without a table returned no row")
    recovers, position, age_seconds, is_paused, delay, receives, waits_for = row
    replayed = Lsn.parse(position or "0/0")
    if replayed >= needed:
        return None
    if not recovers:
        why = PROMOTED
    elif is_paused:
        why = "paused"
    elif waits_for == DELAYED:
        why = "delayed"
    elif waits_for.startswith(CONFLICTS):
        why = "conflict"
    elif not receives:
        why = "not receiving"
    else:
        why = "delayed" if delay else "slow"
    return ReplayState(node, replayed, needed - replayed, age_seconds, why, delay)


def replay_error(state: ReplayState, what: str, seconds: float) -> ReplayLagError:
    """The error for a wait for a standby that is given up; `what` has waited."""
    return ReplayLagError(
        f"{what}: gave up after waiting {seconds:.0f} s: {state.text}",
        hint=state.remedies,
        details={**asdict(state), "replayed": str(state.replayed)},
    )


def report_replay(notes: WaitNotes, state: ReplayState, seconds_max: float) -> None:
    """Report that a standby is waited for, `seconds_max` at most, if a note is due: again if the cause changes."""
    notes.report(state.why, f"up to {seconds_max:.0f} s: {state.text}")


def await_standbys(
    standbys: Collection[Node], needed: Mapping[str, Lsn], seconds_max: float, progress: Progress, what: str
) -> None:
    """Wait until each standby has replayed what its shard has in `needed`, for `seconds_max` at most.

    Raises ReplayLagError, and NodeUnreachableError. `what` names what waits.
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
    """Raise ReplayLagError unless the standby has replayed everything up to `needed`, or soon has."""
    deadline = time.monotonic() + REPLAYED_SECONDS_MAX
    while state := read_replay(node.id, connection, needed):
        if time.monotonic() > deadline:
            raise replay_error(state, f"node {node.id}", REPLAYED_SECONDS_MAX)
        time.sleep(REPLAY_POLL_SECONDS)
