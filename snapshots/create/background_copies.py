"""Copies of large standbys in the background: what increments do with them until all tables are copied.

Copying a large standby would delay the fleet's increments for hours. So an increment only creates the chain's slot on
it (snapshots/create/renewal.py), and leaves the standby out. Its tables are copied after the commits, without the
fleet's lock (snapshots/create/copy_between.py), each at a position of its own. Every increment archives the standby's
WAL as that of the other nodes, under the same definitions, so the server retains no more WAL than usual; but it copies
no tables on it. When all tables of the last commit are copied, the next increment adds the copy to the chain.

The newest commit says which copies are being made (`copying`). Such a copy ends and restarts if its slot is lost, if
its server is another one or has another timeline, if its archive is damaged, or if an increment with changes of tables
does without the standby: its WAL could not be decoded afterwards. If the shard's primary is copied again, or the store
has lost rows of the copy, the copy continues, but those tables are copied once more. Damage of a copy must never fail
an increment: no commit lists the copy's objects yet.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from concurrent.futures import ThreadPoolExecutor

from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import without_node
from cutline.fleet.units import size_text
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import Sessions
from cutline.snapshots.create.context import ChainState
from cutline.snapshots.operations.object_lists import are_stored
from cutline.snapshots.records.background_records import CopyStep, StepsCopied, find_copied, read_steps
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import AbsentCopy, BackgroundCopy, CopiedLater, DefinitionChanges
from cutline.storage.errors import SnapshotError, UnreachableError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.wal.drain.slots import ADVANCED, SlotLostError, check_slot, slot_name, slot_state
from cutline.wal.segments.archive import ArchiveError, Segment, archive_prefix, check_contiguous, segment_key

# Each holds a segment in memory, usually of up to 10 MB.
THREADS_MAX = 8
RESTARTED = "; its copy in the background restarts: "


class StandbyNeededError(UnreachableError):
    """A standby is away that fleet.toml requires while another one of its shard is being copied."""


class UnderwayCopy(Struct, frozen=True):
    """A copy that earlier increments have begun, as the last commit describes it, and what is copied of it by now.

    `segments` are the archive of a complete copy up to the last commit, as `find_underway` returns it.
    """

    copying: BackgroundCopy
    copied: StepsCopied
    segments: tuple[Segment, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether all tables of the last commit are copied."""
        return not self.copied.missing

    @property
    def text(self) -> str:
        """How far the copy is now."""
        return progress_text(self.at_commit(self.copying.last))

    def at_commit(self, last: Segment) -> BackgroundCopy:
        """Return the entry of a commit whose cut is in the archive, which ends with segment `last`."""
        tables = len(self.copied.copied)
        return structs.replace(
            self.copying,
            last=last,
            copied=tables,
            wanted=tables + len(self.copied.missing),
            copied_bytes=self.copied.bytes,
        )


def progress_text(copying: BackgroundCopy) -> str:
    """Return how far the copy is."""
    sizes = f"{size_text(copying.copied_bytes)} of {size_text(max(copying.wanted_bytes, copying.copied_bytes))}"
    return f"{copying.copied:,} of {copying.wanted:,} tables, {sizes}"


def reason_text(copying: BackgroundCopy) -> str:
    """Return why a commit leaves the standby out."""
    return f"it is being copied: {progress_text(copying)}"


def read_underway(
    store: ObjectStore, chain: Chain, node: str, known: dict[str, CopyStep] | None = None
) -> UnderwayCopy:
    """Read how far the copy of a node is that the chain's last commit names; `known` is as in read_steps.

    Before a copy counts as complete, the store must have all objects of its steps. The tables of a step that lacks some
    are copied again.
    """
    copying = chain.copying[node]
    shard = copying.identity.backup_of or node
    steps = read_steps(store, chain.name, node, copying.operation, known)
    wanted = [group.number for group in chain.groups(shard)]
    numbers = chain.numbers_at_cut(shard)
    copied = find_copied(steps, numbers, wanted)
    if not copied.missing and not are_stored(store, (entry for step in copied.steps for entry in step.entries)):
        copied = find_copied([step for step in steps if are_stored(store, step.entries)], numbers, wanted)
    return UnderwayCopy(copying, copied)


def find_underway(
    store: ObjectStore, sessions: Sessions, chain: Chain, to_renew: Mapping[str, str], *, reads_archives: bool = True
) -> tuple[dict[str, UnderwayCopy], dict[str, str]]:
    """Return which of the nodes `to_renew` have copies that continue, and why the others start or restart, by node.

    The copies that continue have the reasons of their beginning. Those that are not complete are `incomplete` in the
    sessions. If fleet.toml requires such a standby now, the increment copies it at once, unless another standby of the
    shard is away: then raises StandbyNeededError. If it `reads_archives`, all segments of complete copies are read.
    """
    underway: dict[str, UnderwayCopy] = {}
    reasons = dict(to_renew)
    for node in sessions.nodes:
        if node.id not in to_renew or (copying := chain.copying.get(node.id)) is None:
            continue
        if problem := _find_problem(store, sessions, chain, node, copying):
            reasons[node.id] = restarted_reason(copying.reason, problem)
            continue
        copy = read_underway(store, chain, node.id)
        if copy.is_complete and reads_archives:
            try:
                copy = replace(copy, segments=_archive_before(store, chain.name, node.id, copying))
            except (ArchiveError, ObjectMissingError) as error:
                problem = error.message if isinstance(error, SnapshotError) else str(error)
                reasons[node.id] = restarted_reason(copying.reason, without_node(problem, node.id))
                continue
        elif not copy.is_complete:
            if not sessions.may_leave_out(node):
                _check_none_away(sessions, chain, node, copy)
                reasons[node.id] = restarted_reason(copying.reason, "fleet.toml requires the standby now")
                continue
            sessions.incomplete.add(node.id)
        underway[node.id] = copy
        reasons[node.id] = copying.reason
    return underway, reasons


def restarted_reason(reason: str, problem: str) -> str:
    """Return the reason of a copy that restarts: why it began at first, and the newest problem."""
    return f"{reason.partition(RESTARTED)[0]}{RESTARTED}{problem}"


def _check_none_away(sessions: Sessions, chain: Chain, node: Node, copy: UnderwayCopy) -> None:
    """Raise StandbyNeededError if another standby of the shard is away whose copy in the chain can be continued."""
    for other in sessions.chosen:
        absence, before = sessions.absent.get(other.id), chain.absent.get(other.id)
        has_copy = other.id in chain.parts and (before is None or not before.has_ended)
        if other.backup_of == node.backup_of and has_copy and absence is not None and not absence.has_ended:
            raise StandbyNeededError(
                f"node {other.id}: {absence.reason}; [copies] require demands it, because standby {node.id} is still"
                f" being copied ({copy.text})",
                hint=f"repeat the command when {other.id} is back; or let increments do without it until {node.id} is"
                f" copied: lower [copies] require in fleet.toml; or remove {other.id} from fleet.toml: then the"
                f" increment copies {node.id} at once",
                details={"shard": node.shard},
            )


def _find_problem(store: ObjectStore, sessions: Sessions, chain: Chain, node: Node, copying: BackgroundCopy) -> str:
    """Return why the copy can't continue; "" if it can."""
    was, now = copying.identity, sessions.identities[node.id]
    if (was.place, was.backup_of) != (now.place, now.backup_of):
        return "it is another server or database"
    if was.timeline != now.timeline:
        return f"its timeline was {was.timeline} and is {now.timeline}"
    if copying.timeline_history != sessions.history(node):
        return f"its timeline {now.timeline} has another history than before"
    slot = slot_name(chain.stored_full.operation)
    try:
        end = _end_of_archive(store, chain.name, node.id, copying)
        with raising_unreachable(node):
            state = slot_state(sessions.connections[node.id], slot)
        check_slot(node.id, slot, state, end, ADVANCED)
    except (SlotLostError, ArchiveError) as error:
        return without_node(error.message, node.id)
    return ""


def _end_of_archive(store: ObjectStore, snapshot: str, node: str, copying: BackgroundCopy) -> Lsn:
    """Return the end of the archive, including segments that were stored after the last commit."""
    prefix = archive_prefix(snapshot, node, copying.operation)
    number = copying.last.number
    while store.exists(segment_key(prefix, number + 1)):
        number += 1
    if number == copying.last.number:
        return copying.last.through
    # Imported here, because it needs Arrow.
    from cutline.wal.segments.segments import read_metadata

    return read_metadata(store, node, segment_key(prefix, number), number).segment.through


def with_underway(state: ChainState, underway: Mapping[str, UnderwayCopy]) -> ChainState:
    """Return the chain's state in which the archives of these copies continue."""
    copies = {node: one.copying for node, one in underway.items()}
    return replace(
        state,
        base={**state.base, **{node: one.base for node, one in copies.items()}},
        segments={**state.segments, **{node: (one.last,) for node, one in copies.items()}},
        archives={**state.archives, **{node: one.operation for node, one in copies.items()}},
        absent=state.absent | copies.keys(),
    )


def carried_copies(
    chain: Chain,
    absent: Mapping[str, AbsentCopy],
    sessions: Sessions,
    changes: DefinitionChanges | None,
    others: Container[str],
) -> dict[str, BackgroundCopy]:
    """Return the copies that continue although this increment does without their nodes, as the next commit has them.

    Those of the `others` have become part of the chain, or have ended.
    """
    listed = {node.id for node in sessions.fleet.nodes}
    carried: dict[str, BackgroundCopy] = {}
    for node, copying in chain.copying.items():
        shard = copying.identity.backup_of
        has_changed = changes is not None and (shard in changes.groups or shard in changes.gone)
        is_away = (node in absent or node not in chain.parts) and node not in others
        if is_away and node in listed and not has_changed and shard not in sessions.fleet.retired:
            carried[node] = copying
    return carried


def _archive_before(store: ObjectStore, snapshot: str, node: str, copying: BackgroundCopy) -> tuple[Segment, ...]:
    """Return the segments of a copy's archive up to the last commit; raise the errors of read_metadata."""
    # Imported here, because it needs Arrow.
    from cutline.wal.segments.segments import read_metadata

    prefix = archive_prefix(snapshot, node, copying.operation)

    def read(number: int) -> Segment:
        return read_metadata(store, node, segment_key(prefix, number), number).segment

    # The fleet's lock is held.
    with ThreadPoolExecutor(THREADS_MAX) as threads:
        segments = list(threads.map(read, range(1, copying.last.number + 1)))
    check_contiguous(node, copying.base, segments, copying.last.through)
    return tuple(segments)


def list_later(store: ObjectStore, copied: StepsCopied, segments: tuple[Segment, ...]) -> tuple[CopiedLater, ...]:
    """Return the tables of the steps with their positions, and the transactions that were in progress there.

    These were prepared before the position and decided later, and changed the tables. `segments` are the whole archive
    of the node.
    """
    # Imported here: a command that is refused does not need Arrow.
    from cutline.snapshots.base_copy.copy_slots import find_changed_groups, find_prepared_at

    prepared = find_prepared_at(store, segments, [step.position for step in copied.steps])
    found: list[CopiedLater] = []
    for step in copied.steps:
        numbers, late = tuple(sorted(step.rows.keys() & copied.copied.keys())), prepared[step.position]
        pending = find_changed_groups(store, segments, late, numbers) if late else {}
        found.append(CopiedLater(step.position, numbers, tuple(pending)))
    return tuple(found)
