"""What the statements of a restore wait for on its targets: for whom, how long at most, and what ends the wait.

DROP DATABASE waits until every process of the server has closed its files. A session whose commit waits for a
synchronous standby does not do so until that standby has answered, nor does a process that is suspended
(procsignal.c, WaitForProcSignalBarrier). Statements about databases and roles also wait for the locks of others, who
may keep a transaction open. The sessions of the watch look for such waits, so they need no sessions of their own.

Statements about databases are cancelled when they have waited too long: the restore ends with an error that names the
others, and can be resumed or undone. What runs inside a restored database waits without a limit, because hardly anyone
else has locks there; in existing tables, waits for locks have limits of their own (restore/rows/held_tables.py), until
the command is stopped.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct, field
from psycopg.errors import Diagnostic

from cutline.fleet.messages import join_some
from cutline.fleet.progress import Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.connections import NodeDisruptedError, raising_unreachable
from cutline.nodes.encodings import readable
from cutline.nodes.open_sessions import CANCEL_SECONDS_MAX
from cutline.nodes.other_databases import REHEARSING, name_beside
from cutline.nodes.poolers import PROCESS_QUERY
from cutline.nodes.problems import comment
from cutline.nodes.synchronous_standbys import END_STANDBYS_WAIT, SYNC_REP
from cutline.nodes.watch import Answer, Question, Watch
from cutline.restore.targets.target import Connections, Target
from cutline.storage.errors import SnapshotError, find_behind

LOOK_SECONDS = 2.0
# How long a statement about a database may wait for others, and how long after the command was stopped.
WAIT_SECONDS_MAX, STOPPED_SECONDS_MAX = 60.0, 5.0
NAMED_MAX = 5
# The backend_type of an application's session.
CLIENT = "client backend"
# The beginning of a statement, without its values: they may be passwords.
SHOWN = re.compile(r"[^'$]{0,120}")
# The source file of the server's message about a process that has not closed its files.
BARRIER_SOURCE = "procsignal.c"
BARRIER, CHECKPOINTS = "ProcSignalBarrier", ("CheckpointStart", "CheckpointDone")
# Our sessions that wait, and the processes for which they wait. 0 stands for a prepared transaction. While a process
# waits for others to close their files, only its server's log names the one that has not.
WAITS_QUERY = f"""
WITH own AS MATERIALIZED (
  SELECT pid, query, wait_event_type, wait_event FROM pg_stat_activity
   WHERE pid = ANY (%(processes)s::int[])
      OR datname = ANY (%(databases)s::text[]) AND usename = session_user AND starts_with(application_name, 'cutline')
), waiting AS MATERIALIZED (
  SELECT pid, {readable("query")} AS query, wait_event,
         CASE WHEN wait_event_type = 'Lock' THEN pg_blocking_pids(pid)
              WHEN wait_event = '{BARRIER}'
              THEN %(heard)s::int[] || ARRAY(SELECT pid FROM pg_stat_activity WHERE wait_event = '{SYNC_REP}')
          END AS blockers
    FROM own WHERE wait_event_type = 'Lock' OR wait_event IN {(BARRIER, *CHECKPOINTS)}
)
SELECT w.pid, w.query, w.wait_event, b.pid, coalesce({readable("a.usename::text")}, ''),
       coalesce({readable("a.datname::text")}, ''),
       coalesce(nullif({readable("a.application_name")}, ''), a.backend_type, ''), coalesce(a.state, ''),
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8, coalesce(a.wait_event = '{SYNC_REP}', false)
  FROM waiting w LEFT JOIN LATERAL (
       SELECT DISTINCT pid FROM unnest(w.blockers) AS blocker (pid)
        WHERE pid NOT IN (SELECT pid FROM own)
          AND (w.wait_event <> '{BARRIER}' OR pid IN (SELECT pid FROM pg_stat_activity))) AS b ON true
  LEFT JOIN pg_stat_activity a ON a.pid = b.pid
 ORDER BY 1, 4
"""


class TargetBlockedError(NodeDisruptedError):
    """A statement about a target's database has waited too long for another session or process, or would wait."""


class Blocker(Struct, frozen=True):
    """A process for which a statement waits; its pid is 0 if it is a prepared transaction.

    `age_seconds` is the age of its transaction, None if it has none or the server does not show it. If it
    `is_committing`, its commit waits for a synchronous standby.
    """

    pid: int
    user: str
    database: str
    application: str
    state: str
    age_seconds: float | None
    is_committing: bool

    def text(self) -> str:
        """Describe the process, for messages."""
        if not self.pid:
            return "a prepared transaction"
        shown = ", ".join(filter(None, [self.state, self.application if self.application != CLIENT else ""]))
        where = f" in database {self.database}" if self.database else ""
        age = "" if self.age_seconds is None else f", {self.age_seconds:.0f} s old"
        why = ", whose commit waits for a synchronous standby" if self.is_committing else ""
        who = f" of {self.user}{where}" if self.user else ""
        return f"process {self.pid}{f' ({shown})' if shown else ''}{who}{age}{why}"

    def remedy(self) -> str:
        """Return the statement that ends the wait."""
        if not self.pid:
            return "SELECT * FROM pg_prepared_xacts;"
        return f"SELECT {'pg_cancel_backend' if self.is_committing else 'pg_terminate_backend'}({self.pid});"


class Wait(Struct, frozen=True):
    """A statement of ours that waits on a node, and for whom."""

    node: str
    statement: str
    event: str
    blockers: tuple[Blocker, ...]

    @property
    def text(self) -> str:
        """For whom the statement waits, for messages."""
        if self.event in CHECKPOINTS:
            return "a checkpoint of its server"
        if not self.blockers:
            return "a process that has not closed its files; the server's log may name it"
        return join_some((blocker.text() for blocker in self.blockers), NAMED_MAX)

    def remedies(self) -> list[str]:
        """Return the statements that end the wait, each kind after a comment."""
        named = self.blockers[:NAMED_MAX]
        lines: list[str] = []
        if committing := [blocker for blocker in named if blocker.is_committing]:
            what = (
                f"{END_STANDBYS_WAIT}, or cancel these waits: the transactions are then committed on this server only"
            )
            lines += [comment(f"on node {self.node}, {what}:"), *(blocker.remedy() for blocker in committing)]
        if others := [blocker for blocker in named if blocker.pid and not blocker.is_committing]:
            what = "to end them; if that does not, end their processes on the server's machine"
            lines += [comment(f"on node {self.node}, {what}:"), *(blocker.remedy() for blocker in others)]
        if prepared := [blocker for blocker in named if not blocker.pid]:
            what = "to see the prepared transactions; COMMIT PREPARED or ROLLBACK PREPARED ends one"
            lines += [comment(f"on node {self.node}, {what}:"), *(blocker.remedy() for blocker in prepared)]
        return lines


class _Own(Struct):
    """A session of ours whose waits are bounded, and the processes that its server has named while it waited."""

    node: str
    session: psycopg.Connection[Any]
    seconds_max: float
    heard: set[int] = field(default_factory=set)


class _WaitKey(NamedTuple):
    """Identifies a wait: the node, our session's process and its statement."""

    node: str
    process: int
    statement: str


class TargetWaits:
    """Reports the waits of a command's statements on its targets, and bounds those of statements about databases."""

    def __init__(self, targets: Iterable[Target], progress: Progress) -> None:
        self._databases = {target.node.id: _names_of(target) for target in targets}
        self._progress = progress
        self._own: dict[tuple[str, int], _Own] = {}
        self._notes: dict[_WaitKey, WaitNotes] = {}
        self._seconds_max = math.inf
        self._given_up: dict[str, tuple[Wait, float]] = {}
        self._cancelled: set[_WaitKey] = set()

    def bound(self, target: Target, session: psycopg.Connection[Any], seconds_max: float | None = None) -> None:
        """Give up a statement in this session that waits longer: by default than WAIT_SECONDS_MAX.

        After `hurry`, the limit is STOPPED_SECONDS_MAX.
        """
        with raising_unreachable(target.node):
            (process,) = session.execute(PROCESS_QUERY).fetchone() or (0,)
            # The server names the process for which it waits only in its log, of which a session may get its own part.
            session.execute("SELECT pg_catalog.set_config('client_min_messages', 'log', false)")
        own = self._own[target.node.id, process] = _Own(
            target.node.id, session, WAIT_SECONDS_MAX if seconds_max is None else seconds_max
        )
        session.add_notice_handler(partial(_hear, own))

    def hurry(self) -> None:
        """The command was stopped: give up waits after STOPPED_SECONDS_MAX."""
        self._seconds_max = STOPPED_SECONDS_MAX

    @contextmanager
    def naming_blocked(self, then: str = "") -> Iterator[None]:
        """Raise TargetBlockedError if the block fails because a statement was given up; `then` ends its hint."""
        try:
            yield
        except (SnapshotError, psycopg.Error) as error:
            cancelled = find_behind(error, psycopg.errors.QueryCanceled)
            if cancelled is None or isinstance(error, TargetBlockedError) or not self._given_up:
                raise
            node = error.details.get("node") if isinstance(error, SnapshotError) else None
            wait, seconds = self._given_up.get(str(node)) or next(iter(self._given_up.values()))
            raise blocked_error(wait, seconds, then) from error

    @property
    def question(self) -> Question:
        """What the watch asks the nodes."""
        return Question(WAITS_QUERY, self._parameters, self._take, LOOK_SECONDS)

    def _parameters(self, node: str) -> dict[str, object]:
        # Other threads may add sessions meanwhile.
        own = {process: one for (place, process), one in list(self._own.items()) if place == node}
        heard = sorted({pid for one in own.values() for pid in one.heard})
        return {"processes": list(own), "databases": self._databases.get(node, []), "heard": heard}

    def _take(self, node: str, rows: Answer) -> None:
        waits = {_WaitKey(node, process, wait.statement): wait for process, wait in _waits_of(node, rows)}
        for ended in [key for key in self._notes if key.node == node and key not in waits]:
            del self._notes[ended]
            self._cancelled.discard(ended)
        waiting = {key.process for key in waits}
        for (place, process), one in list(self._own.items()):
            if place == node and process not in waiting:
                one.heard.clear()
        told: set[frozenset[int]] = set()
        for key, wait in waits.items():
            notes = self._notes.setdefault(key, WaitNotes(f"node {node}: {wait.statement}", self._progress))
            blockers = frozenset(blocker.pid for blocker in wait.blockers)
            if blockers not in told:
                notes.report(blockers, _note_text(wait))
                told.add(blockers)
            own = self._own.get((node, key.process))
            if own is None or wait.event in CHECKPOINTS:
                continue
            # A cancel request must not reach the session's next statement.
            is_late = notes.waited_seconds >= min(own.seconds_max, self._seconds_max)
            if is_late and key not in self._cancelled:
                self._cancelled.add(key)
                self._give_up(own, wait, notes.waited_seconds, partial(self._cancelled.discard, key))

    def _give_up(self, own: _Own, wait: Wait, seconds: float, failed: Callable[[], object]) -> None:
        self._given_up[own.node] = wait, seconds
        # The watch must not wait for the server's answer.
        threading.Thread(target=_cancel, args=(own.session, failed), name="cancel", daemon=True).start()


def _names_of(target: Target) -> list[str]:
    """Return the names of the databases in which a restore's sessions work: real, temporary and of a rehearsal."""
    return [
        target.database,
        target.loading,
        name_beside(target.database, REHEARSING, target.loading.rsplit("_", 1)[-1]),
    ]


def _hear(own: _Own, said: Diagnostic) -> None:
    if said.source_file == BARRIER_SOURCE and (number := re.search(r"\d+", said.message_primary or "")):
        own.heard.add(int(number[0]))


def _cancel(session: psycopg.Connection[Any], failed: Callable[[], object]) -> None:
    """Cancel the session's statement; call `failed` if the request did not reach the server."""
    try:
        session.cancel_safe(timeout=CANCEL_SECONDS_MAX)
    except psycopg.Error:
        failed()


def _waits_of(node: str, rows: Answer) -> Iterator[tuple[int, Wait]]:
    """Yield our sessions that wait, by process; waits for nobody but ourselves are left out."""
    for process, some in groupby(rows, key=itemgetter(0)):
        _, query, event, *_ = (found := list(some))[0]
        blockers = tuple(Blocker(*blocker) for _, _, _, *blocker in found if blocker[0] is not None)
        if blockers or event in (BARRIER, *CHECKPOINTS):
            yield process, Wait(node, show_beginning(query), event or "", blockers)


def show_beginning(query: str) -> str:
    """Return the beginning of a statement on one line, up to its first value."""
    match = SHOWN.match(query)
    shown = match[0] if match else ""
    return " ".join(shown.split()) + ("…" if len(shown) < len(query) else "")


def _note_text(wait: Wait) -> str:
    named = wait.blockers[:NAMED_MAX]
    remedies = [blocker.remedy() for blocker in named if blocker.pid and not blocker.is_committing]
    if any(blocker.is_committing for blocker in named):
        remedies.insert(0, END_STANDBYS_WAIT)
    return f"{wait.text}; to end the wait: {' '.join(remedies)}" if remedies else wait.text


def blocked_error(wait: Wait, seconds: float, then: str = "") -> TargetBlockedError:
    """Return the error for a statement that was given up; `then` ends its hint."""
    return TargetBlockedError(
        f"node {wait.node}: {wait.statement}: gave up after waiting {seconds:.0f} s for {wait.text}",
        hint=[*(wait.remedies() or ["see the server's log"]), *filter(None, [then])],
        details={"node": wait.node, "processes": [blocker.pid for blocker in wait.blockers]},
    )


@contextmanager
def bounding_waits(
    watch: Watch, targets: Sequence[Target], connections: Connections | Mapping[str, Any], progress: Progress
) -> Iterator[TargetWaits]:
    """Report and bound the waits of these sessions while the block runs; raises TargetBlockedError as well.

    The waits of the command's other sessions in the targets' databases are reported only.
    """
    waits = TargetWaits(targets, progress)
    for target in targets:
        if target.shard in connections:
            waits.bound(target, connections[target.shard])
    with watch.asking(waits.question), waits.naming_blocked("then repeat the command"):
        yield waits
