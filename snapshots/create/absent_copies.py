"""Standbys that a create does without, so that a copy that is away never stops a chain.

A standby is left out if it can't be reached or is late, unless `[copies] require` in fleet.toml demands it. Its slot
stays: a later increment archives all WAL since the end of its archive, and from then on the copy is compared again. A
copy ends, which the commits say, if its slot is lost, if its server has WAL that its primary lacks, or if tables of its
shard change while it is left out: their rows were copied without it. Then a later increment copies the standby again
(snapshots/create/renewal.py).

Only the primaries' archives determine a cut, so nothing else depends on which standbys take part.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TypeVar

from msgspec import structs

from cutline.fleet.chain_ids import renamed_nodes
from cutline.fleet.config import Fleet, Node
from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.fleet.messages import name_nodes, unlisted_text, without_node
from cutline.fleet.progress import News, Progress
from cutline.fleet.wait_notes import WaitNotes
from cutline.nodes.baseline import NodeIdentity, why_replaced
from cutline.nodes.connections import NodeUnreachableError, raising_unreachable
from cutline.nodes.free_connections import find_too_few, refuse_too_few
from cutline.nodes.left_out import LeftOut, LeftOutKind, absent_copy
from cutline.nodes.problems import NodeProblem, NodeUnfitError
from cutline.nodes.publications import publication_names
from cutline.nodes.sessions import Absence, Sessions, in_parallel
from cutline.nodes.timelines import read_switches, read_timeline
from cutline.nodes.watch import silent_error
from cutline.snapshots.base_copy.copy_ranges import RowUnreadableError
from cutline.snapshots.ddl.table_changes import JOINING
from cutline.snapshots.operations.retired_nodes import with_retired
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import UNLISTED, AbsentCopy, Commit, DefinitionChanges
from cutline.snapshots.records.proven_chains import point_label
from cutline.storage.errors import RefusedError, SnapshotError, UnreachableError
from cutline.wal.drain.lineage import WalDivergedError
from cutline.wal.drain.open_transactions import SlotSnapshotError
from cutline.wal.drain.replay import ReplayLagError, read_replay, replay_error, replay_state, report_replay
from cutline.wal.drain.slots import NoFreeSlotError, SlotLostError, drop_slots, slot_name
from cutline.wal.segments.archive import SegmentDamagedError

Result = TypeVar("Result")
POLL_SECONDS = 0.05
# With one of these errors, the copy of a node has ended.
ENDING = (SlotLostError, WalDivergedError, SegmentDamagedError)
# These are errors of a node itself, although repeating the command does not help. If a row that a standby can't read
# can't be read on its primary either, that raises the same error.
OF_THE_NODE = (*ENDING, NoFreeSlotError, SlotSnapshotError, RowUnreadableError)
# While nothing commits, servers flush whole pages only. So this position may be in the middle of a record whose rest is
# flushed up to 15 seconds later, and replay stops before it.
FLUSHED_QUERY = "SELECT pg_current_wal_flush_lsn()::text"
# With its transaction id, it writes a commit, up to which all WAL is flushed within moments.
COMMIT_QUERY = "SELECT pg_current_xact_id()"
REPLAYED_QUERY = "SELECT pg_last_wal_replay_lsn()::text"
BACK = "when it is back, the next increment adds what is missing"
ENDED = "the next increment that can copies it again"
CONTINUES = "the next increments continue with it"
ADDED = "no commit of the chain has a copy of it"


class StandbyDivergedError(RefusedError):
    """A standby has WAL that its primary lacks, so it can't follow the primary."""


def standby_wait_seconds(fleet: Fleet, wait_seconds: float) -> float:
    """Return how long an increment waits for standbys: at most `wait_seconds`, and less if it can do without them."""
    return wait_seconds if fleet.standbys_min is None else min(wait_seconds, fleet.standby_wait_seconds)


def leave_out(sessions: Sessions, node: Node, error: SnapshotError, *, has_ended: bool = False) -> None:
    """Do without the standby because of `error`; raise the error if fleet.toml requires the standby.

    Its copy can't be continued if it `has_ended`, or because of the error.
    """
    if not sessions.may_leave_out(node):
        raise error
    reason = without_node(error.message, node.id)
    sessions.leave_out(node, Absence(reason, has_ended=has_ended or isinstance(error, ENDING)))


def find_spare(sessions: Sessions, error: SnapshotError) -> Node | None:
    """Return the standby whose failure caused `error`, if the command can do without it."""
    if not isinstance(error, OF_THE_NODE) and error.exit_code != UnreachableError.exit_code:
        return None
    named = error.details.get("node")
    return next((node for node in sessions.nodes if node.id == named and sessions.may_leave_out(node)), None)


def leave_out_failed(sessions: Sessions, error: Exception, progress: Progress) -> bool:
    """Leave out the standbys that caused `error`, which is noted; return False if none did that can be left out.

    If a node falls silent, its sessions and the jobs are ended, and any error may follow.
    """
    before = frozenset(sessions.absent)
    if not leave_out_silent(sessions):
        if not isinstance(error, SnapshotError) or (node := find_spare(sessions, error)) is None:
            return False
        leave_out(sessions, node, error)
        if isinstance(error, ReplayLagError):
            # They were waited for together. Each further cut would wait for the next of them.
            for other in [node for node in sessions.nodes if node.id in error.late]:
                if sessions.may_leave_out(other):
                    leave_out(sessions, other, error.late[other.id])
    note_left_out(sessions, before, progress)
    return True


def repeat_without_failed(
    fleet: Fleet, progress: Progress, command: Callable[[Callable[[], None]], Result], name: str = "the create"
) -> Result:
    """Call `command`; if a standby fails that fleet.toml does not require, call it again, as long as nothing is stored.

    It opens its sessions again, which leaves out a standby that is still away. `command` calls its argument before it
    stores anything. From then on, a create deals with such standbys itself.
    """
    # Errors that pass through here name nodes by the chain's ids (naming_listed_ids).
    standbys = {node.id: node for node in fleet.nodes if node.backup_of is not None}
    counts = Counter(node.shard for node in standbys.values())
    for left in range(len(standbys), -1, -1):
        has_begun = threading.Event()
        try:
            return command(has_begun.set)
        except SnapshotError as error:
            node = standbys.get(str(error.details.get("node")))
            is_spare = node is not None and fleet.standbys_needed(node.shard) < counts[node.shard]
            if has_begun.is_set() or not left or not is_spare or error.exit_code != UnreachableError.exit_code:
                raise
            progress.note(News(f"{error.message}; {name} begins again"))
    raise ValueError("the last call returns or raises")


def note_servers(
    sessions: Sessions,
    progress: Progress,
    absent: Collection[str] = (),
    baseline: Mapping[str, NodeIdentity] = MappingProxyType({}),
) -> None:
    """Note the promoted servers and the standbys that are left out.

    Those that the chain's last commit shows as well are not noted again: `absent`, and the timelines in `baseline`.
    """
    for primary, standby in sessions.promoted.items():
        if primary not in baseline or baseline[primary].timeline != sessions.identities[primary].timeline:
            progress.note(News(f"{standby} was promoted: its server is the primary {primary} now"))
    note_left_out(sessions, absent, progress)


def leave_out_late(sessions: Sessions, progress: Progress, wait_seconds: float) -> None:
    """Leave out the standbys that don't replay within `wait_seconds` what their primaries have written by now.

    Those that never will, because their servers have other WAL, are left out at once; their copies have ended. The
    caller holds no lock yet, so nobody else waits for them.
    """
    _leave_out_diverged(sessions)
    standbys = [node for node in sessions.nodes if node.backup_of is not None and sessions.may_leave_out(node)]
    if not standbys:
        return
    written = sessions.ask_primaries(lambda connection: connection.execute(FLUSHED_QUERY).fetchone())
    needed = {shard: Lsn.parse(row[0]) for shard, row in written.items() if row is not None}
    _flush_for_late(sessions, standbys, needed)
    began = time.monotonic()

    def wait(node: Node) -> SnapshotError | None:
        notes = WaitNotes("the create", progress, began)
        try:
            with raising_unreachable(node):
                while state := read_replay(node.id, sessions.connections[node.id], needed[node.shard]):
                    waited = time.monotonic() - began
                    if state.is_hopeless(wait_seconds):
                        return ReplayLagError(state.text, hint=state.remedies, details={"node": node.id})
                    if waited > wait_seconds:
                        return replay_error(state, f"node {node.id}", waited)
                    report_replay(notes, state, wait_seconds)
                    time.sleep(POLL_SECONDS)
                # Of a quiet primary it may have replayed everything, and yet will not replay what the command writes.
                state = replay_state(node.id, sessions.connections[node.id], needed[node.shard])
                if state.is_hopeless(wait_seconds):
                    return ReplayLagError(state.text, hint=state.remedies, details={"node": node.id})
        except NodeUnreachableError as error:
            return error
        return None

    for node, error in zip(standbys, in_parallel(wait, standbys), strict=True):
        if error is not None:
            leave_out(sessions, node, error)


def _flush_for_late(sessions: Sessions, standbys: Collection[Node], needed: Mapping[str, Lsn]) -> None:
    """Let the primaries flush the record that ends after `needed`, if a standby has not replayed up to there.

    An idle primary, whose standbys have, writes nothing: a watch asks every minute, and each commit would make the
    server take a checkpoint, and fill a WAL file if it has an archive_timeout.
    """

    def is_late(node: Node) -> bool:
        with suppress(NodeUnreachableError), raising_unreachable(node):
            return read_replay(node.id, sessions.connections[node.id], needed[node.shard]) is not None
        # Who waits for it finds that it is away.
        return False

    def commit(primary: Node) -> None:
        with raising_unreachable(primary):
            sessions.connections[primary.id].execute(COMMIT_QUERY)

    late = {node.shard for node, found in zip(standbys, in_parallel(is_late, standbys), strict=True) if found}
    in_parallel(commit, [sessions.fleet.node(shard) for shard in late])


def _leave_out_diverged(sessions: Sessions) -> None:
    """Leave out the standbys that have WAL after their primaries' timelines branched off, or WAL of another history.

    After a failover, a standby that was ahead of the promoted server is one, and so is the old primary if it comes back
    without pg_rewind. Such a server may have replayed more bytes than its primary has written, and so is not late.

    Corrects the timelines in `sessions.identities`: a standby shows a new one late.
    """

    def find(node: Node) -> SnapshotError | None:
        identity, current = sessions.identities[node.id], sessions.identities[node.shard].timeline
        try:
            with raising_unreachable(node):
                # Read this first: the standby may reach the new timeline now, and continue.
                row = sessions.connections[node.id].execute(REPLAYED_QUERY).fetchone()
            timeline = read_timeline(node)
        except (NodeUnreachableError, NodeUnfitError) as error:
            return error
        sessions.identities[node.id] = structs.replace(identity, timeline=timeline)
        if timeline == current:
            return None
        end = read_switches(sessions.fleet.node(node.shard), current).get(timeline)
        replayed = Lsn.parse(row[0]) if row and row[0] else ORIGIN
        if end is not None and replayed <= end:
            return None
        left = f"which its primary left at {end}"
        if end is None:
            left = f"which is not in the history of its primary's timeline {current}"
        return StandbyDivergedError(
            f"node {node.id}: it has replayed WAL up to {replayed} on timeline {timeline}, {left}: it can't follow its"
            " primary",
            hint="make it a standby again (pg_rewind, pg_basebackup): the next increment then copies it",
            details={"node": node.id, "timeline": timeline, "replayed": str(replayed)},
        )

    timelines = {node.id: sessions.identities[node.id].timeline for node in sessions.nodes}
    others = [node for node in sessions.nodes if timelines[node.id] != timelines[node.shard]]
    for node, error in zip(others, in_parallel(find, others), strict=True):
        if error is not None:
            leave_out(sessions, node, error, has_ended=isinstance(error, StandbyDivergedError))


def leave_out_crowded(sessions: Sessions) -> None:
    """Leave out the standbys with too few free connections.

    Raises TooFewConnectionsError if another node has too few, or a standby that fleet.toml requires.
    """
    lacking = find_too_few(sessions.by_node)
    for one in lacking[:]:
        if sessions.may_leave_out(one.node):
            lacking.remove(one)
            reason = f"too few connections are free for the role of its dsn: it {one.text}"
            sessions.leave_out(one.node, Absence(reason))
    refuse_too_few(lacking)


def leave_out_unfit(
    sessions: Sessions, problems: Iterable[NodeProblem], progress: Progress, *, only_away: bool = False
) -> list[NodeProblem]:
    """Leave out the standbys whose own settings are the problem, which is noted; return the problems that are left.

    With `only_away`, the others stay. Privileges that a standby lacks are those of its primary.
    """
    before, left = frozenset(sessions.absent), list(problems)
    for node in sessions.nodes:
        own = [problem for problem in left if problem.node == node.id]
        is_chosen = any(problem.is_away for problem in own) or not only_away
        if own and is_chosen and all(problem.place is None for problem in own) and sessions.may_leave_out(node):
            reason, remedy = (
                "; ".join(texts) for texts in zip(*((one.problem, one.remedy) for one in own), strict=True)
            )
            sessions.leave_out(node, Absence(reason, remedy=remedy))
            left = [problem for problem in left if problem.node != node.id]
    note_left_out(sessions, before, progress)
    return left


def note_left_out(sessions: Sessions, before: Collection[str], progress: Progress) -> None:
    """Note the standbys that are left out, except those that were left out `before`."""
    for node, absence in sessions.absent.items():
        if node not in before:
            progress.note(News(f"standby {node} is left out: {absence.reason}"))


def leave_out_silent(sessions: Sessions) -> bool:
    """Leave out the standbys that have fallen silent; return False if none has, or if another node has as well."""
    silent = sessions.watch.silent()
    nodes = [node for node in sessions.nodes if node.id in silent]
    if not nodes or len(nodes) < len(silent) or not all(map(sessions.may_leave_out, nodes)):
        return False
    for node in nodes:
        leave_out(sessions, node, silent_error({node.id: silent[node.id]}))
    return True


def joining_primaries(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """Return the primaries in fleet.toml of whose shards the chain has no copy."""
    return tuple(node for node in fleet.primaries if node.id not in chain.parts)


def retired_shards(fleet: Fleet, chain: Chain) -> tuple[str, ...]:
    """Return the shards of the chain that fleet.toml lists as retired."""
    return tuple(shard for shard in chain.primaries if shard in fleet.retired)


def joining_standbys(fleet: Fleet, chain: Chain) -> tuple[Node, ...]:
    """Return the standbys in fleet.toml of which the chain has no copy.

    If the full snapshot was taken without standbys, there are none. Those of shards that join are among them.
    """
    full, shards = chain.full, {*chain.primaries, *(node.id for node in joining_primaries(fleet, chain))}
    has_standbys = any(out.kind == LeftOutKind.ABSENT_COPY for out in full.left_out) or len(chain.parts) > len(
        chain.primaries
    )
    known = chain.parts.keys() | {entry.name for entry in chain.too_old}
    added = (node for node in fleet.nodes if node.backup_of in shards and node.id not in known)
    return tuple(added) if has_standbys else ()


def find_renewable(sessions: Sessions, chain: Chain, replaced: Collection[str] = ()) -> dict[str, str]:
    """Return the nodes whose copies can only restart, with the reason, by node.

    These are standbys whose copies have ended or never began, the nodes of shards that join the chain, and those whose
    databases were replaced by others; `replaced` are the shards for which any other server is accepted.
    """
    joining = {node.id for node in joining_primaries(sessions.fleet, chain)}
    baseline = chain.baseline
    reasons: dict[str, str] = {}
    for node in sessions.nodes:
        was, absent = baseline.get(node.id), chain.absent.get(node.id)
        if was is None:
            reasons[node.id] = JOINING if node.shard in joining else ADDED
        elif why := why_replaced(was, sessions.identities[node.id], is_expected=node.shard in replaced):
            reasons[node.id] = why
        elif absent is not None and absent.has_ended:
            reasons[node.id] = f"left out since increment {absent.since}: {absent.reason}"
    return reasons


def leave_out_ended(sessions: Sessions, chain: Chain, progress: Progress) -> None:
    """Leave out the standbys whose copies have ended, and drop their slots, for which they would retain WAL.

    New copies that are being made stay.
    """
    slot = slot_name(chain.full.operation)
    ended = [
        node
        for node in sessions.nodes
        if node.id in chain.absent and chain.absent[node.id].has_ended and node.id not in chain.copying
    ]
    for node in ended:
        sessions.leave_out(node, Absence(chain.absent[node.id].reason, has_ended=True))
    if left := drop_slots(ended, slot):
        progress.note(f"slot {slot} could not be dropped on {', '.join(left)}; the next create will retry")


def note_removed(chain: Chain, absent: Mapping[str, AbsentCopy], fleet: Fleet, progress: Progress) -> None:
    """Note the standbys that were removed from fleet.toml since the last commit: no command reaches their slots."""
    slot, listed = slot_name(chain.stored_full.operation), {node.id for node in fleet.nodes}
    removed = {node for node, copy in absent.items() if copy.reason == UNLISTED and node not in chain.absent}
    # A standby that is being copied is absent in the last commit, or no part of the chain yet.
    removed |= {node for node in chain.copying if node not in listed and (node in absent or node not in chain.parts)}
    for node in sorted(removed):
        progress.note(unlisted_text([node], "the chain's slot", slot))


def drop_retired(sessions: Sessions, chain: Chain, progress: Progress) -> None:
    """Drop the chain's slots on nodes of shards that have left it, as far as fleet.toml still lists them.

    For a slot that nobody reads, a server keeps WAL. Slots that can't be dropped now are left to the next increment.
    """
    slot = slot_name(chain.stored_full.operation)
    nodes = with_retired(sessions, chain.all_system_identifiers) if chain.retired else ()
    left = drop_slots((node for node in nodes if node.shard in chain.retired), slot)
    if left:
        progress.note(
            f"slot {slot} could not be dropped on {name_nodes(left)} of a retired shard; the next increment tries"
            " again. If the server is gone, remove the node from fleet.toml"
        )


def note_retired(fleet: Fleet, chain: Chain, retired: Collection[str], progress: Progress) -> None:
    """Note the shards that an increment retired, what is left on them, and the slots that it can't reach.

    `chain` ends before the increment.
    """
    slot, last = slot_name(chain.stored_full.operation), chain.last.increment
    listed = {node.id for node in fleet.retired_nodes}
    for shard in retired:
        progress.note(News(f"shard {shard} has left the chain: it can be restored up to {point_label(last)}"))
        # Other chains of the store may still have the shard, so nothing drops them.
        progress.note(
            f"Cutline's publications stay on shard {shard}, where PostgreSQL rejects updates of a table in them that"
            f" loses its replica identity; once no chain gets increments of the shard, and if its server still runs,"
            f" run there: DROP PUBLICATION {', '.join(publication_names(chain.full.fleet_id))}"
        )
        unlisted = [node for node, primary in chain.parts.items() if shard in (node, primary) and node not in listed]
        if unlisted:
            progress.note(unlisted_text(unlisted, "the chain's slot", slot))


def absent_copies(chain: Chain, sessions: Sessions, changes: DefinitionChanges | None) -> dict[str, AbsentCopy]:
    """Return the copies that the next commit of the chain leaves out, by node; `changes` are those in the commit."""
    present, found = {node.id for node in sessions.nodes}, dict[str, AbsentCopy]()
    retired = retired_shards(sessions.fleet, chain)
    for identity in chain.nodes:
        node, shard = identity.node, identity.backup_of
        if shard is None or node in present or shard in retired:
            continue
        before = chain.absent.get(node)
        absence = sessions.absent.get(node) or Absence(UNLISTED, has_ended=True)
        reason, has_ended = absence.reason, absence.has_ended
        if before is not None and before.has_ended:
            has_ended = True
        elif changes is not None and (shard in changes.groups or shard in changes.gone):
            reason, has_ended = f"tables of {shard} have changed while it was left out ({reason})", True
        last = chain.original(chain.newest_segments(node)[-1])
        found[node] = AbsentCopy(before.since if before else chain.last.increment + 1, reason, last, has_ended)
    return found


def left_out_standbys(
    chain: Chain,
    absent: Mapping[str, AbsentCopy],
    sessions: Sessions,
    renewed: Collection[str],
    copying: Collection[str] = (),
) -> tuple[LeftOut, ...]:
    """Return the entries of a commit for the standbys without a copy at its cut: `absent`, and those never copied.

    Increments continue the copies of those in `copying`.

    If the full snapshot was taken without standbys, they are not named.
    """
    out = []
    for node, copy in absent.items():
        what_next = CONTINUES if node in copying else ENDED if copy.has_ended else BACK
        out.append(absent_copy(chain.shard_of(node), node, f"{copy.reason}; {what_next}", copy.since))
    for standby in joining_standbys(sessions.fleet, chain):
        if standby.id not in renewed:
            absence = sessions.absent.get(standby.id)
            reason = f"{absence.reason if absence else ADDED}; {CONTINUES if standby.id in copying else ENDED}"
            out.append(absent_copy(standby.shard, standby.id, reason))
    return tuple(out)


def never_copied(sessions: Sessions) -> tuple[LeftOut, ...]:
    """Return the entries of a full snapshot's commit for the standbys that it does without."""
    return tuple(
        absent_copy(node.shard, node.id, f"{sessions.absent[node.id].reason}; the next increment copies it")
        for node in sessions.chosen
        if node.id in sessions.absent
    )


def renamed_of(chain: Chain, sessions: Sessions, renewed: Collection[str]) -> dict[str, str]:
    """Return the ids in fleet.toml of the nodes that the chain knows by others, as the next commit has them.

    A node that is no longer listed keeps the id that it had there, unless another node has that id now.
    """
    now, listed = renamed_nodes(sessions.fleet), {node.listed_id for node in sessions.fleet.nodes}
    known = {*chain.all_nodes, *renewed, *(node.id for node in sessions.fleet.nodes)}
    earlier = {node: name for node, name in chain.renamed.items() if name not in listed}
    earlier = {node: name for node, name in earlier.items() if all(node != one.id for one in sessions.fleet.nodes)}
    return {node: name for node, name in sorted({**earlier, **now}.items()) if node in known and name not in known}


def timelines_of(chain: Chain, sessions: Sessions, renewed: Collection[str]) -> dict[str, int]:
    """Return the timelines of the nodes that are no longer on those of their copies, as the next commit has them.

    Absent nodes keep the timeline of the last commit. The copies of `renewed` nodes begin with it.
    """
    retired = retired_shards(sessions.fleet, chain)
    nodes = [one for one in chain.nodes if (one.backup_of or one.node) not in retired]
    known = chain.last.timelines
    found = {one.node: known[one.node] for one in nodes if one.node in known and one.node not in renewed}
    for identity in nodes:
        now = sessions.identities.get(identity.node) if identity.node not in renewed else None
        if now is not None and now.timeline != identity.timeline:
            found[identity.node] = now.timeline
    return found


def switches_of(
    sessions: Sessions, before: Commit | None = None, absent: Iterable[str] = ()
) -> dict[str, dict[int, Lsn]]:
    """Return where the earlier timelines of the nodes ended, as the commit after `before` has them.

    Those of `absent` nodes are as in `before`.
    """
    found = {} if before is None else {node: before.switches.get(node, {}) for node in absent}
    found |= {node.id: sessions.history(node).switches for node in sessions.nodes}
    return {node: switches for node, switches in found.items() if switches}
