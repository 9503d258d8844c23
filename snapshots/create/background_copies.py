"""Copies of large standbys that begin again: what increments do with them until all tables are copied.

Copying a large standby would delay the fleet's increments for hours. So an increment only creates the chain's slot on
it (snapshots/create/renewal.py), and leaves the standby out. Its tables are copied after the commits, without the
fleet's lock (snapshots/create/copy_between.py), each at a position of its own. Every increment archives the standby's
WAL as that of the other nodes, under the same definitions, so the server retains no more WAL than usual; but it copies
no tables on it. When all tables of the last commit are copied, the next increment adds the copy to the chain.

The newest commit says which copies are being made (`copying`). Such a copy ends, and begins again, if its slot is lost,
if its server is another one or has another timeline, or if an increment with changes of tables does without the
standby: its WAL could not be decoded afterwards.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from cutline.fleet.config import Node
from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import without_node
from cutline.fleet.units import size_text
from cutline.nodes.connections import raising_unreachable
from cutline.nodes.sessions import Sessions
from cutline.snapshots.create.context import ChainState
from cutline.snapshots.records.background_records import CopyStep, StepsCopied, find_copied, read_steps
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import AbsentCopy, BackgroundCopy, CopiedLater, DefinitionChanges
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.drain.slots import ADVANCED, SlotLostError, check_slot, slot_name, slot_state
from cutline.wal.segments.archive import ArchiveError, Segment, archive_prefix, check_contiguous, segment_key


@dataclass(frozen=True, slots=True)
class UnderwayCopy:
    """A copy that earlier increments have begun, as the last commit describes it, and what is copied of it by now."""

    copying: BackgroundCopy
    copied: StepsCopied

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
    """Read how far the copy of a node is that the chain's last commit names; `known` is as in read_steps."""
    copying = chain.copying[node]
    shard = copying.identity.backup_of or node
    steps = read_steps(store, chain.name, node, copying.operation, known)
    wanted = [group.number for group in chain.groups(shard)]
    return UnderwayCopy(copying, find_copied(steps, chain.numbers_at_cut(shard), wanted))


def find_underway(
    store: ObjectStore, sessions: Sessions, chain: Chain, to_renew: Mapping[str, str]
) -> tuple[dict[str, UnderwayCopy], dict[str, str]]:
    """Return which of the nodes `to_renew` have copies that go on, and why the others begin (again), by node.

    The copies that go on have the reasons of their beginning. Those that are not complete are `incomplete` in the
    sessions. A copy does not go on if fleet.toml requires the standby now: the increment copies it at once.
    """
    underway: dict[str, UnderwayCopy] = {}
    reasons = dict(to_renew)
    for node in sessions.nodes:
        if node.id not in to_renew or (copying := chain.copying.get(node.id)) is None:
            continue
        if problem := _find_problem(store, sessions, chain, node, copying):
            reasons[node.id] = f"{copying.reason}; the copy that had begun can't go on: {problem}"
            continue
        copy = read_underway(store, chain, node.id)
        if not copy.is_complete:
            if not sessions.may_leave_out(node):
                reasons[node.id] = f"{copying.reason}; fleet.toml requires it now"
                continue
            sessions.incomplete.add(node.id)
        underway[node.id] = copy
        reasons[node.id] = copying.reason
    return underway, reasons


def _find_problem(store: ObjectStore, sessions: Sessions, chain: Chain, node: Node, copying: BackgroundCopy) -> str:
    """Return why the copy can't go on; "" if it can."""
    was, now = copying.identity, sessions.identities[node.id]
    if (was.place, was.backup_of) != (now.place, now.backup_of):
        return "it is another server or database"
    if was.timeline != now.timeline:
        return f"its timeline was {was.timeline} and is {now.timeline}"
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
    """Return the chain's state in which the archives of these copies go on."""
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
    """Return the copies that go on although this increment does without their nodes, as the next commit has them.

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


def archive_before(store: ObjectStore, snapshot: str, node: str, copying: BackgroundCopy) -> tuple[Segment, ...]:
    """Return the segments of a copy's archive up to the last commit; raise the errors of read_metadata."""
    # Imported here, because it needs Arrow.
    from cutline.wal.segments.segments import read_metadata

    prefix = archive_prefix(snapshot, node, copying.operation)
    numbers = range(1, copying.last.number + 1)
    segments = [read_metadata(store, node, segment_key(prefix, number), number).segment for number in numbers]
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


def incomplete_error(problem: str) -> SnapshotError:
    """Return the error for a copy that can't be added to the chain."""
    return SnapshotError(problem, hint="repeat the command: it copies the standby again")
