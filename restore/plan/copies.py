"""Choose the copy from which each table's rows are taken; read and verify the copies' objects on request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from msgspec import Struct, field
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.messages import DRILL_COMMAND, SAME_TARGET, list_some
from cutline.fleet.progress import Progress
from cutline.restore.scope.scope import ChosenTables
from cutline.snapshots.operations.object_damage import (
    ChainObject,
    Damage,
    Damages,
    VerifyTask,
    find_listed_damage,
    list_entries,
    list_objects,
    lost_lists,
    verify_object,
)
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    LARGE_OBJECTS,
    ReadList,
)
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import increment_label, read_chain
from cutline.snapshots.records.tombstones import SnapshotDeletedError
from cutline.spark.spark_jobs import Dealing, raise_first, run_many, shared_problem
from cutline.storage.errors import SnapshotError
from cutline.storage.location import StoreLocation
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def count_bytes(chain: Chain, shards: Collection[str]) -> int:
    """Count the bytes of all objects in one copy of each of these shards, that of its primary: a restore reads one.

    For a lost list, count only the list object itself.
    """
    nodes = {node for node in chain.present if node in shards}
    segments = sum(segment.size for node in nodes for segment in chain.segments(node))
    entries = [entry for commit in chain.commits for entry in commit.entries if entry.node in nodes]
    return segments + sum(entry.bytes if isinstance(entry, ReadList) else entry.size for entry in entries)


def standbys_of(chain: Chain, shard: str) -> list[str]:
    """Return the standbys whose copies of the shard reach the last cut, and had begun before its position.

    At an exact time, a copy that began again with the increment may have begun later.
    """
    return [
        node
        for node in chain.present
        if node != shard and chain.shard_of(node) == shard and chain.complete_at[node] <= chain.position(node)
    ]


class CopyNeeds(Struct, frozen=True):
    """The objects that make up a node's copy at the chain's last commit; `numbers` are its numbers_at_cut.

    Changes count from `counted_from` on, and so do those of the `earlier` transactions.
    """

    chain: Chain
    node: str
    numbers: Mapping[int, int]
    counted_from: Lsn
    earlier: frozenset[Lsn]

    @classmethod
    def of(cls, chain: Chain, node: str) -> CopyNeeds:
        """Determine the needs of the node's copy."""
        counted_from, pending = chain.counted_from(node)
        earlier = pending - chain.excluded(node) if pending else pending
        return cls(chain, node, chain.numbers_at_cut(node), counted_from, earlier)

    def groups_of(self, chain_object: ChainObject) -> frozenset[int]:
        """Return the numbers of the groups whose rows can't be restored from this copy without the object."""
        if chain_object.node != self.node:
            return self._shared_groups_of(chain_object)
        # What a copy had before it began again is needed only by the increments before.
        if not self.chain.begun(self.node) <= chain_object.increment <= self.chain.last.increment:
            return frozenset()
        if isinstance(chain_object.stored, Segment):
            # A segment may contain changes of every group.
            position = self.chain.position(self.node)
            is_needed = chain_object.stored.may_count(self.counted_from, position, self.earlier)
            return frozenset(self.numbers.values()) if is_needed else frozenset()
        if chain_object.stored.kind != BASE:
            return frozenset()
        return frozenset(self.numbers[number] for number in chain_object.stored.rows if number in self.numbers)

    def _shared_groups_of(self, chain_object: ChainObject) -> frozenset[int]:
        """Return the groups of an object of the primary's copy, if this copy begins with it."""
        stored = chain_object.stored
        if isinstance(stored, Segment) or stored.kind != BASE or chain_object.node != self.chain.base_of(self.node):
            return frozenset()
        shared = self.chain.shared_groups(self.node).intersection(stored.rows)
        return frozenset(self.numbers[number] for number in shared if number in self.numbers)


LOST_LARGE_OBJECTS = "large objects"


def needs_other(chain: Chain, shard: str, chain_object: ChainObject) -> str:
    """Return which part of the shard, other than rows, is lost without the object: `DDL`, `large objects` or ""."""
    if chain_object.node != shard or isinstance(chain_object.stored, Segment):
        return ""
    if chain_object.stored.kind == DDL and chain_object.stored == chain.ddl_object(shard):
        return "DDL"
    return LOST_LARGE_OBJECTS if chain_object.stored.kind == LARGE_OBJECTS else ""


NAMED_MAX = 20


class Wanted(Struct, frozen=True):
    """The parts of a chain that a restore needs: groups of each shard, large objects, DDL.

    `nodes` limits the restore to these shards. `command` is the command that the user typed, without --increment. If
    `use_backup_copies`, rows missing from a primary's copy may be taken from a standby's; `may_use_backup_copies` says
    whether the command allows that option.
    """

    tables: ChosenTables
    large_objects: bool
    use_backup_copies: bool
    may_use_backup_copies: bool = True
    nodes: tuple[str, ...] = ()
    command: str = ""
    ddl: bool = True

    def numbers(self, chain: Chain, shard: str) -> frozenset[int]:
        """Return the numbers of the shard's groups that are restored."""
        return frozenset(group.number for group in self.tables.of(chain.groups(shard)))

    def takes(self, what: str) -> bool:
        """Whether the restore needs `what`, a part named by `needs_other`."""
        return (what == "DDL" and self.ddl) or (what == LOST_LARGE_OBJECTS and self.large_objects)


class CopyChoice(Struct, frozen=True):
    """The copies to take rows from: `borrowed` maps standbys to group numbers; all other rows come from primaries.

    `damaged` are the needed objects that can't be used.
    """

    borrowed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()


class LostPart(Struct, frozen=True):
    """A part that no usable copy contains: a group (with its number of partitions), the DDL or the large objects."""

    shard: str
    what: str
    partitions: int | None = None

    @property
    def text(self) -> str:
        """The part's name without its shard.

        All partitions are named, because any of them may have had rows in the lost object.
        """
        if self.partitions is None:
            return self.what
        return f"{self.what} (partition{'s 0 to' if self.partitions > 1 else ''} {self.partitions - 1})"


def choose_copies(chain: Chain, wanted: Wanted, damages: Damages) -> tuple[CopyChoice, list[LostPart]]:
    """For every group, choose the first intact copy, starting with the primary's; also return the lost parts."""
    # Expand only the lists of nodes with damage.
    nodes = {damage.node for damage in damages.values()}.intersection(chain.baseline)
    # A standby's copy may begin with the objects of its primary.
    nodes |= {primary for node in nodes if node in chain.parts and (primary := chain.base_of(node))}
    objects = [stored_object for stored_object in list_objects(chain, sorted(nodes)) if stored_object.key in damages]
    borrowed: dict[str, frozenset[int]] = {}
    lost: list[LostPart] = []
    used: set[str] = set()
    for shard in wanted.nodes or chain.primaries:
        numbers = wanted.numbers(chain, shard)
        missing, at_fault = _missing(chain, shard, numbers, objects)
        used |= at_fault
        for standby in standbys_of(chain, shard) if wanted.use_backup_copies else ():
            still_missing, at_fault = _missing(chain, standby, missing, objects)
            used |= at_fault
            if taken := missing - still_missing:
                borrowed[standby] = taken
            missing = still_missing
        groups = {group.number: group for group in chain.groups(shard)}
        lost += [LostPart(shard, groups[number].name, groups[number].partitions) for number in sorted(missing)]
        for stored_object in objects:
            if wanted.takes(what := needs_other(chain, shard, stored_object)):
                used.add(stored_object.key)
                lost.append(LostPart(shard, what))
    return CopyChoice(
        borrowed, tuple(damages[stored_object.key] for stored_object in objects if stored_object.key in used)
    ), list(dict.fromkeys(lost))


def _missing(
    chain: Chain, node: str, numbers: frozenset[int], objects: Iterable[ChainObject]
) -> tuple[frozenset[int], set[str]]:
    """Return the numbers of the groups that are missing from the node's copy, and the keys of the damaged objects."""
    if not numbers:
        return numbers, set()
    needs = CopyNeeds.of(chain, node)
    present = {
        stored_object.key: groups for stored_object in objects if (groups := needs.groups_of(stored_object) & numbers)
    }
    return frozenset[int]().union(*present.values()), set(present)


def settle_copies(store: ObjectStore, chain: Chain, wanted: Wanted, damages: Damages) -> CopyChoice:
    """Choose the copies; if a part is lost, raise ObjectDamagedError listing the losses and restorable increments."""
    choice, lost = choose_copies(chain, wanted, damages)
    if lost:
        raise _damage_error(store, chain, wanted, choice, (lost, damages))
    return choice


def check_chosen(chain: Chain, wanted: Wanted, choice: CopyChoice) -> None:
    """Raise ObjectDamagedError if rows are now missing from copies chosen earlier, because an object list is lost.

    A lost object is noticed when it is read, but the objects on a lost list would never be read.
    """
    for chain_object, lost in lost_lists(chain):
        shard = chain.shard_of(chain_object.node)
        if shard not in (wanted.nodes or chain.primaries):
            continue
        standbys = standbys_of(chain, shard)
        of_copies = {each: choice.borrowed.get(each, frozenset()) for each in standbys}
        of_copies[shard] = wanted.numbers(chain, shard).difference(*of_copies.values())
        is_needed = any(
            CopyNeeds.of(chain, node).groups_of(chain_object) & numbers
            for node, numbers in of_copies.items()
            if numbers
        )
        if is_needed or wanted.takes(needs_other(chain, shard, chain_object)):
            raise lost_list_error(lost)


def explain_damage(store: ObjectStore, chain: Chain, wanted: Wanted, error: ObjectDamagedError) -> ObjectDamagedError:
    """Extend the error for an object that turned out to be altered when it was read; list the resulting losses."""
    if "lost" in error.details:
        return error
    key, node, kind = (str(error.details.get(name)) for name in ("object", "node", "kind"))
    damages = {**find_listed_damage(store, chain), key: Damage(key, node, kind, error.message.partition(": ")[2])}
    # Standbys' copies can't help: either they are already in use, or the user did not allow them.
    wanted = replace(wanted, use_backup_copies=False)
    choice, lost = choose_copies(chain, wanted, damages)
    if not any(damage.key == key for damage in choice.damaged):
        return error
    return _damage_error(store, chain, wanted, choice, (lost, damages))


def _damage_error(
    store: ObjectStore, chain: Chain, wanted: Wanted, choice: CopyChoice, found: tuple[list[LostPart], Damages]
) -> ObjectDamagedError:
    lost, damages = found
    # Later increments may have more damage, which must not prevent the hint from listing the restorable increments.
    try:
        longest = read_chain_lists(store, (read_from_merge if chain.beginning else read_chain)(store, chain.name))
    except SnapshotDeletedError:
        # The objects are deleted, not damaged.
        raise
    except SnapshotError:
        longest = chain
    damages = {**find_listed_damage(store, longest), **damages}
    without, with_standbys = (
        _restorable(longest, replace(wanted, use_backup_copies=allowed), damages)
        for allowed in (False, wanted.may_use_backup_copies)
    )
    number = chain.last.increment
    command, hints = wanted.command, []
    if not wanted.use_backup_copies and number in with_standbys:
        hints.append(f"standbys' copies contain these rows: {command} --use-backup-copies --increment {number}")
    if without:
        newest = f"{command} --increment {without[-1]}"
        hints.append(
            f"increments that can still be restored: {number_ranges(without)}; to restore the newest: {newest}"
        )
    elif with_standbys:
        some = number_ranges(with_standbys)
        newest = f"{command} --use-backup-copies --increment {with_standbys[-1]}"
        hints.append(f"increments that can still be restored from standbys' copies: {some}; the newest: {newest}")
    else:
        hints.append("no increment can be restored")
    if command and not command.startswith(DRILL_COMMAND) and all(part.what == LOST_LARGE_OBJECTS for part in lost):
        hints.append(f"to restore the tables without large objects: {command} --group '*' --increment {number}")
    if command and command in " ".join(hints) and not command.startswith(DRILL_COMMAND):
        hints.append(SAME_TARGET)
    first = choice.damaged[0]
    named = [f"{list_some([part.text for part in parts], NAMED_MAX)} of {shard}" for shard, parts in _by_shard(lost)]
    others = [f"{damage.key} of node {damage.node}: {damage.detail}" for damage in choice.damaged[1:]]
    detail = first.detail + (f"; also damaged: {list_some(others, NAMED_MAX)}" if others else "")
    return ObjectDamagedError(
        key=first.key,
        kind=first.kind,
        node=first.node,
        detail=f"{detail}; without it, {increment_label(chain.name, number)} lacks {'; '.join(named)}",
        hints=hints,
        more={
            "damaged": [{"object": damage.key, "node": damage.node, "kind": damage.kind} for damage in choice.damaged],
            "lost": [{"shard": part.shard, "what": part.what, "partitions": part.partitions} for part in lost],
            "restorable": without,
            "restorable_with_backup_copies": with_standbys,
        },
    )


def _restorable(chain: Chain, wanted: Wanted, damages: Damages) -> list[int]:
    parts = (chain.up_to(commit.increment) for commit in chain.commits)
    return [
        part.last.increment
        for part in parts
        if part.parts.keys() >= set(wanted.nodes) and not choose_copies(part, wanted, damages)[1]
    ]


def _by_shard(lost: Iterable[LostPart]) -> list[tuple[str, list[LostPart]]]:
    return [(shard, list(parts)) for shard, parts in groupby(lost, lambda one: one.shard)]


def number_ranges(numbers: Iterable[int]) -> str:
    """Format the numbers as ranges, such as `0 to 3, 5`."""
    ranges: list[str] = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        numbers_of_run = [number for _, number in run]
        ranges.append(
            f"{numbers_of_run[0]} to {numbers_of_run[-1]}" if len(numbers_of_run) > 1 else str(numbers_of_run[0])
        )
    return ", ".join(ranges)


def verify_copies(
    session: SparkSession, chain: Chain, wanted: Wanted, store: StoreLocation, progress: Progress
) -> CopyChoice:
    """Read the needed objects and choose the copies; standbys' objects are read only if a primary's are damaged.

    Raises ObjectDamagedError if no copy contains a needed part.
    """
    opened = store.open()
    damages = find_listed_damage(opened, chain)

    def verify(copies: str, nodes: Sequence[str]) -> dict[str, Damage]:
        # Take the total from the commits, because the list of all objects may be too large for the driver.
        total = sum(needed_entry.count for needed_entry in needed_entries(chain, nodes, wanted))
        if not total:
            return {}
        progress.step(f"verify copies of {copies}", total=total, unit="objects")
        objects = (
            needed_object for needed_object in needed_objects(chain, nodes, wanted) if needed_object.key not in damages
        )
        return _verify(session, (VerifyTask(stored_object, store) for stored_object in objects), progress, total)

    damages |= verify("primaries", wanted.nodes or chain.primaries)
    choice, _ = choose_copies(chain, wanted, damages)
    damaged = {chain.shard_of(damage.node) for damage in choice.damaged}
    damages |= verify("standbys", [standby for shard in sorted(damaged) for standby in standbys_of(chain, shard)])
    return settle_copies(opened, chain, wanted, damages)


def needed_entries(chain: Chain, nodes: Iterable[str], wanted: Wanted) -> Iterator[ChainObject]:
    """Yield the commit entries that the wanted groups need from these nodes' copies, plus DDL and large objects.

    Includes an object list if any of its objects may be needed.
    """
    return _needed(chain, list_entries(chain, nodes), wanted)


def needed_objects(chain: Chain, nodes: Iterable[str], wanted: Wanted) -> Iterator[ChainObject]:
    """Yield the needed objects of `needed_entries`, with object lists expanded."""
    objects = (stored_object for entry in needed_entries(chain, nodes, wanted) for stored_object in entry.expand())
    return _needed(chain, objects, wanted)


def _needed(chain: Chain, listed: Iterable[ChainObject], wanted: Wanted) -> Iterator[ChainObject]:
    for node, of_node in groupby(listed, lambda one: one.node):
        copy, numbers = CopyNeeds.of(chain, node), wanted.numbers(chain, chain.shard_of(node))
        for stored_object in of_node:
            if copy.groups_of(stored_object) & numbers or wanted.takes(needs_other(chain, node, stored_object)):
                yield stored_object


def _verify(session: SparkSession, tasks: Iterable[VerifyTask], progress: Progress, total: int) -> dict[str, Damage]:
    damages, left, dealing = dict[str, Damage](), total, Dealing[VerifyTask](lambda task: task.chain_object.stored.size)
    for reports in run_many(session, verify_object, tasks, progress, dealing, shared_problem):
        raise_first([report.problem for report in reports])
        damages |= {report.damage.key: report.damage for report in reports if report.damage}
        left -= len(reports)
    # Also count the skipped objects: those of other groups, and those already known to be damaged.
    progress.advance(left)
    return damages
