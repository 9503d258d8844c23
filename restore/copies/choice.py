"""Choose from which copy each table's rows are taken, or refuse: nothing is restored in part without being asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from cutline.fleet.hints import SAME_TARGET
from cutline.fleet.some_names import list_some
from cutline.fleet.tables.groups import Group
from cutline.restore.copies.stored import (
    ChainObject,
    CopyNeeds,
    Damage,
    Damages,
    find_listed_damage,
    list_objects,
    lost_lists,
    needs_other,
)
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.chains import read_chain
from cutline.snapshots.records.commits import increment_label
from cutline.snapshots.records.tombstones import SnapshotDeletedError
from cutline.storage.errors import SnapshotError
from cutline.storage.store import ObjectStore
from cutline.wal.segments.damage import ObjectDamagedError

NAMED_MAX = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a restore takes of a chain: groups of each shard, large objects or not, DDL or not; `nodes`: of these alone.

    `command` is the one that was typed, without --increment. `use_backup_copies`: rows that a primary's copy lacks may
    be taken from a standby's; `may_use_backup_copies`: the command may ask for that.
    """

    groups: Callable[[Chain, str], Iterable[Group]]
    large_objects: bool
    use_backup_copies: bool
    may_use_backup_copies: bool = True
    nodes: tuple[str, ...] = ()
    command: str = ""
    ddl: bool = True

    def numbers(self, chain: Chain, shard: str) -> frozenset[int]:
        """The numbers of the shard's groups that are restored."""
        return frozenset(group.number for group in self.groups(chain, shard))

    def takes(self, what: str) -> bool:
        """Whether the restore takes what `needs_other` names."""
        return (what == "DDL" and self.ddl) or (what == "large objects" and self.large_objects)


@dataclass(frozen=True, slots=True)
class CopyChoice:
    """From which copies rows are taken: `borrowed` are group numbers by standby, all others come from primaries.

    `damaged` are the objects that are needed and can't be used.
    """

    borrowed: Mapping[str, frozenset[int]] = field(default_factory=dict)
    damaged: tuple[Damage, ...] = ()


@dataclass(frozen=True, slots=True)
class LostPart:
    """What is in no copy that may be used: a group with its number of partitions, the DDL or the large objects."""

    shard: str
    what: str
    partitions: int | None = None

    @property
    def text(self) -> str:
        """The part without its shard. Any partition may have had rows in the object."""
        if self.partitions is None:
            return self.what
        return f"{self.what} (partition{'s 0 to' if self.partitions > 1 else ''} {self.partitions - 1})"


def choose_copies(chain: Chain, wanted: Wanted, damages: Damages) -> tuple[CopyChoice, list[LostPart]]:
    """For every group, choose the first copy that has its rows, the primary's first; find those that none has."""
    # No list of another node is read.
    nodes = {one.node for one in damages.values()}.intersection(chain.baseline)
    objects = [one for one in list_objects(chain, sorted(nodes)) if one.key in damages]
    borrowed: dict[str, frozenset[int]] = {}
    lost: list[LostPart] = []
    used: set[str] = set()
    for shard in wanted.nodes or chain.full.primaries:
        numbers = wanted.numbers(chain, shard)
        missing, at_fault = _missing(chain, shard, numbers, objects)
        used |= at_fault
        for standby in (one.node for one in chain.nodes if wanted.use_backup_copies and one.backup_of == shard):
            still_missing, at_fault = _missing(chain, standby, missing, objects)
            used |= at_fault
            if taken := missing - still_missing:
                borrowed[standby] = taken
            missing = still_missing
        groups = {group.number: group for group in chain.groups(shard)}
        lost += [LostPart(shard, groups[number].name, groups[number].partitions) for number in sorted(missing)]
        for one in objects:
            if wanted.takes(what := needs_other(chain, shard, one)):
                used.add(one.key)
                lost.append(LostPart(shard, what))
    return CopyChoice(borrowed, tuple(damages[one.key] for one in objects if one.key in used)), list(
        dict.fromkeys(lost)
    )


def _missing(
    chain: Chain, node: str, numbers: frozenset[int], objects: Iterable[ChainObject]
) -> tuple[frozenset[int], set[str]]:
    """Which of the groups the node's copy lacks, and the keys of the objects at fault."""
    if not numbers:
        return numbers, set()
    needs = CopyNeeds.of(chain, node)
    found = {one.key: groups for one in objects if (groups := needs.groups_of(one) & numbers)}
    return frozenset[int]().union(*found.values()), set(found)


def settle_copies(store: ObjectStore, chain: Chain, wanted: Wanted, damages: Damages) -> CopyChoice:
    """Choose the copies; raise ObjectDamagedError, which names what is lost and what can be restored, if one lacks."""
    choice, lost = choose_copies(chain, wanted, damages)
    if lost:
        raise _damage_error(store, chain, wanted, choice, (lost, damages))
    return choice


def check_chosen(chain: Chain, wanted: Wanted, choice: CopyChoice) -> None:
    """Raise ObjectDamagedError if copies that were chosen before lack rows now, because an object list of them is lost.

    The loss of an object shows when it is read; what a lost list listed would never be read.
    """
    for one, lost in lost_lists(chain):
        shard = chain.shard_of(one.node)
        if shard not in (wanted.nodes or chain.full.primaries):
            continue
        numbers = choice.borrowed.get(one.node, frozenset())
        if one.node == shard:
            standbys = [each.node for each in chain.nodes if each.backup_of == shard]
            numbers = wanted.numbers(chain, shard).difference(*(choice.borrowed.get(each, ()) for each in standbys))
        if CopyNeeds.of(chain, one.node).groups_of(one) & numbers or wanted.takes(needs_other(chain, shard, one)):
            raise lost_list_error(lost)


def explain_damage(store: ObjectStore, chain: Chain, wanted: Wanted, error: ObjectDamagedError) -> ObjectDamagedError:
    """The error for an object that turned out to be altered while it was read, with what is lost without it."""
    if "lost" in error.details:
        return error
    key, node, kind = (str(error.details.get(name)) for name in ("object", "node", "kind"))
    damages = {**find_listed_damage(store, chain), key: Damage(key, node, kind, error.message.partition(": ")[2])}
    # From a standby's copy rows were taken already, or must not be.
    wanted = replace(wanted, use_backup_copies=False)
    choice, lost = choose_copies(chain, wanted, damages)
    if not any(one.key == key for one in choice.damaged):
        return error
    return _damage_error(store, chain, wanted, choice, (lost, damages))


def _damage_error(
    store: ObjectStore, chain: Chain, wanted: Wanted, choice: CopyChoice, found: tuple[list[LostPart], Damages]
) -> ObjectDamagedError:
    lost, damages = found
    # A later increment may be damaged more, and must not hide what can be restored.
    try:
        longest = read_chain_lists(store, read_chain(store, chain.name), allow_damage=True)
    except SnapshotDeletedError:
        # Its objects are no damage.
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
        hints.append(f"standbys' copies have these rows: {command} --use-backup-copies --increment {number}")
    if without:
        newest = f"{command} --increment {without[-1]}"
        hints.append(f"increments that can still be restored: {number_ranges(without)}; the newest of them: {newest}")
    elif with_standbys:
        some = number_ranges(with_standbys)
        newest = f"{command} --use-backup-copies --increment {with_standbys[-1]}"
        hints.append(f"increments that can still be restored from standbys' copies: {some}; the newest: {newest}")
    else:
        hints.append("no increment can be restored")
    if command and command in " ".join(hints) and "--drill" not in command:
        hints.append(SAME_TARGET)
    first = choice.damaged[0]
    named = [f"{list_some([one.text for one in parts], NAMED_MAX)} of {shard}" for shard, parts in _by_shard(lost)]
    others = [f"{one.key} of node {one.node}: {one.detail}" for one in choice.damaged[1:]]
    detail = first.detail + (f"; damaged too: {list_some(others, NAMED_MAX)}" if others else "")
    return ObjectDamagedError(
        key=first.key,
        kind=first.kind,
        node=first.node,
        detail=f"{detail}; without it, {increment_label(chain.name, number)} lacks {'; '.join(named)}",
        hints=hints,
        more={
            "damaged": [{"object": one.key, "node": one.node, "kind": one.kind} for one in choice.damaged],
            "lost": [{"shard": one.shard, "what": one.what, "partitions": one.partitions} for one in lost],
            "restorable": without,
            "restorable_with_backup_copies": with_standbys,
        },
    )


def _restorable(chain: Chain, wanted: Wanted, damages: Damages) -> list[int]:
    """The increments that can be restored in spite of the damage."""
    return [
        commit.increment
        for commit in chain.commits
        if not choose_copies(chain.up_to(commit.increment), wanted, damages)[1]
    ]


def _by_shard(lost: Iterable[LostPart]) -> list[tuple[str, list[LostPart]]]:
    return [(shard, list(parts)) for shard, parts in groupby(lost, lambda one: one.shard)]


def number_ranges(numbers: Iterable[int]) -> str:
    """The numbers as ranges, such as `0 to 3, 5`."""
    ranges: list[str] = []
    for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        ranges.append(f"{found[0]} to {found[-1]}" if len(found) > 1 else str(found[0]))
    return ", ".join(ranges)
