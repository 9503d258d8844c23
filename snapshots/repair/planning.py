"""Plan a repair: find the damaged objects of a snapshot, and for each of them a source that can be trusted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import groupby
from typing import TypeAlias

from msgspec import Struct, field

from cutline.fleet.config import Fleet
from cutline.fleet.messages import list_some
from cutline.fleet.progress import Progress
from cutline.snapshots.operations.object_damage import (
    Damage,
    VerifyTask,
    find_listed_damage,
    list_entries,
    list_objects,
    verify_object,
)
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.operations.open_operations import read_recorded_commits
from cutline.snapshots.operations.removed_chains import naming_removed
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    LARGE_OBJECTS,
    Commit,
    FullSnapshot,
    ObjectList,
    ReadList,
    StoredObject,
    listed_objects,
    parts_of_entries,
)
from cutline.snapshots.records.documents import ManifestError
from cutline.snapshots.records.merged_chain import read_from_merge
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    find_place,
    increment_label,
    listed_numbers,
    read_chain,
)
from cutline.snapshots.records.repair_records import next_repair_number
from cutline.snapshots.records.repaired_chain import parts_of
from cutline.snapshots.records.store_identity import StoreIdentity, check_of_fleet, read_identity
from cutline.snapshots.records.tombstones import check_not_deleted, is_only_full
from cutline.snapshots.repair.base_rows import BaseUnit, at_cut, list_bases, mapping_of
from cutline.snapshots.repair.rebuilt_segments import NotRebuildableError, find_overlapping
from cutline.snapshots.repair.second_store import SecondStore
from cutline.snapshots.repair.work import Work
from cutline.spark.spark_jobs import SparkSource
from cutline.storage.errors import UsageError
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.stored_form import AsWritten, stored_form
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError

Entry: TypeAlias = StoredObject | ObjectList | Segment
TABLES_NAMED_MAX = 5
MISSING = "missing"
ONE_COPY = "no other copy contains it; a copy of the store does: --from URL"


class RepairRequest(Struct, frozen=True):
    """Repair the snapshot `name`; `other` is the place of a second store (SecondStore.of), if any.

    Only the objects in `objects` are read (all, if it is empty), and none if `metadata_only`. Missing objects and wrong
    sizes are found in any case.
    """

    name: str
    other: str | None = None
    objects: tuple[str, ...] = ()
    metadata_only: bool = False


class Method(StrEnum):
    """How damaged objects are repaired."""

    PUT_BACK = "put-back"
    FETCH = "fetch"
    REBUILD_ROWS = "rebuild-rows"
    REBUILD_SEGMENT = "rebuild-segment"


class LocatedEntry(Struct, frozen=True):
    """An entry of the commit of `increment`, in its `part` (repaired_chain.parts_of).

    `list` is the key of the object list that contains it; "" if the commit names it.
    """

    entry: Entry
    increment: int
    part: str
    list: str = ""


class RepairStep(Struct, frozen=True):
    """Damaged objects that are repaired together.

    `copy` is the node from whose copy they are rebuilt, `further` those that are tried if that can't be used, and
    `tables` names their tables; all are empty if they come from another store.
    """

    method: Method
    located: tuple[LocatedEntry, ...]
    damages: tuple[Damage, ...]
    copy: str = ""
    tables: str = ""
    further: tuple[str, ...] = ()

    @property
    def node(self) -> str:
        """The node to whose copy the objects belong."""
        return self.damages[0].node

    @property
    def increment(self) -> int:
        """The increment whose commit lists the objects."""
        return self.located[0].increment

    @property
    def unit(self) -> BaseUnit:
        """The base objects to rebuild."""
        return BaseUnit(self.node, self.copy, self.increment, self.damage_of_entries)

    @property
    def damage_of_entries(self) -> dict[str, str]:
        """The kinds of damage by the keys of the entries that are damaged, or whose list of dead rows is."""
        kinds = {one.key: one.kind for one in self.damages}
        return {
            one.entry.key: kinds[part.key]
            for one in self.located
            for part in reversed([*parts_of_entries([one.entry])])
            if part.key in kinds
        }


class Unrepairable(Struct, frozen=True):
    """An object that can't be repaired, and the reason."""

    key: str
    why: str


class MissingCommit(Struct, frozen=True):
    """A missing commit file of a full snapshot (increment 0) or increment that another store has.

    `what` is its label, and `digest` the digest in its seal.
    """

    key: str
    what: str
    increment: int
    digest: str


class RepairPlan(Struct, frozen=True):
    """What a repair will do.

    `chain` is None if commits are missing: they have to be put back before anything else can be seen. `number` is the
    number of the repair. `read` says whether all objects were read.
    """

    request: RepairRequest
    chain: Chain | None
    number: int
    damages: tuple[Damage, ...] = ()
    steps: tuple[RepairStep, ...] = ()
    commits: tuple[MissingCommit, ...] = ()
    unrepairable: tuple[Unrepairable, ...] = ()
    other: SecondStore | None = None
    read_all: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.steps or self.commits)


def plan_repair(fleet: Fleet, request: RepairRequest, spark: SparkSource, progress: Progress) -> RepairPlan:
    """Find the damage and plan its repair, reading only. Raises the errors of read_chain and of SecondStore.of."""
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    other = SecondStore.of(fleet, request.other) if request.other else None
    progress.step(f"read {request.name}")
    with naming_removed(store, request.name):
        return _plan_repair(fleet, request, Work(fleet.store, spark, progress), identity, other)


def _plan_repair(
    fleet: Fleet, request: RepairRequest, work: Work, identity: StoreIdentity, other: SecondStore | None
) -> RepairPlan:
    store = fleet.store.open()
    try:
        chain = read_from_merge(store, request.name)
    except SnapshotMissingError:
        if other is None:
            raise
        return _plan_commits(fleet, store, identity, request, other)
    check_of_fleet(chain, identity)
    if other is not None and (plan := _plan_commits(fleet, store, identity, request, other)).commits:
        return plan
    chain = read_chain_lists(store, chain)
    damages = find_damage(chain, request, work)
    planner = _Planner(chain, store, damages, other)
    planner.plan()
    return RepairPlan(
        request,
        chain,
        next_repair_number(store, chain.name),
        tuple(damages.values()),
        tuple(planner.steps),
        (),
        tuple(planner.unrepairable),
        other,
        read_all=not (request.objects or request.metadata_only),
    )


def find_damage(chain: Chain, request: RepairRequest, work: Work) -> dict[str, Damage]:
    """Return the damaged objects of the chain by key; raise UsageError if the chain has no object that was named."""
    store = work.location.open()
    damages = find_listed_damage(store, chain, chain.all_nodes)
    if request.metadata_only:
        return damages
    entries = list(list_entries(chain, chain.all_nodes))
    size = sum(one.stored.bytes if isinstance(one.stored, ReadList) else one.stored.size for one in entries)
    rows = sum(sum(one.stored.rows.values()) for one in entries if not isinstance(one.stored, Segment))
    work.begin(size, rows)
    # The chain may list millions of objects.
    named = frozenset(request.objects)
    # Objects that the listing showed to be damaged are not read.
    total = len(named - damages.keys()) if named else max(sum(one.count for one in entries) - len(damages), 0)
    work.progress.step("read objects", total=total, unit="objects")
    unknown = set(named - damages.keys())
    tasks = (
        VerifyTask(one, work.location)
        for one in list_objects(chain, chain.all_nodes)
        if one.key not in damages and (not named or one.key in named)
    )
    is_local = work.is_local(size) or bool(request.objects)
    found: dict[str, Damage] = {}
    for reports in work.run_many(verify_object, tasks, lambda task: task.chain_object.stored.size, is_local=is_local):
        unknown -= {task.chain_object.key for task, _ in reports}
        found |= {report.damage.key: report.damage for _, report in reports if report.damage}
    if unknown:
        raise UsageError(
            f"snapshot {chain.name} lists no object {min(unknown)}",
            hint=f"--object takes a key that snapshot check {chain.name} named",
        )
    return damages | found


def locate(chain: Chain, keys: Iterable[str], nodes: Iterable[str]) -> dict[str, LocatedEntry]:
    """Find the entries with these keys, or whose dead rows have them; only the lists of `nodes` are searched."""
    wanted, of_nodes = set(keys), set(nodes)
    found: dict[str, LocatedEntry] = {}
    for commit in chain.commits:
        for key, (part, entry) in parts_of(commit).items():
            keys = entry.keys if isinstance(entry, StoredObject) else {key}
            found |= dict.fromkeys(keys & wanted, LocatedEntry(entry, commit.increment, part))
            if isinstance(entry, ObjectList) and entry.node in of_nodes:
                for stored in listed_objects(entry):
                    found |= dict.fromkeys(stored.keys & wanted, LocatedEntry(stored, commit.increment, part, key))
    return found


def _beginning(key: str) -> str:
    """Return what the keys of a copy task's objects have in common; see group_by_copy_task."""
    return key.rsplit("-", 2)[0]


class _Planner(Struct):
    """Finds a source for each damaged object."""

    chain: Chain
    store: ObjectStore
    damages: Mapping[str, Damage]
    other: SecondStore | None
    steps: list[RepairStep] = field(default_factory=list)
    unrepairable: list[Unrepairable] = field(default_factory=list)

    def plan(self) -> None:
        """Plan a step for each object that can be repaired."""
        nodes = {damage.node for damage in self.damages.values()}
        located = locate(self.chain, self.damages, nodes)
        bases: list[LocatedEntry] = []
        large: dict[str, list[LocatedEntry]] = {}
        # An object and the list of its dead rows are repaired together.
        for one in {located[key].entry.key: located[key] for key in self.damages}.values():
            entry, damages = one.entry, self._damages_of(one)
            damage = damages[0]
            why = self._why_not_elsewhere(entry)
            if why is None and isinstance(entry, StoredObject) and entry.kind == LARGE_OBJECTS:
                large.setdefault(_beginning(entry.key), []).append(one)
            elif why is None:
                is_missing = all(part.kind == MISSING for part in damages)
                self.steps.append(RepairStep(Method.PUT_BACK if is_missing else Method.FETCH, (one,), damages))
            elif isinstance(entry, Segment):
                self._rebuild_segment(one, entry, damage, why)
            elif entry.kind == BASE:
                bases.append(one)
            else:
                self._give_up(damage, why or ONE_COPY)
        for together in large.values():
            self._fetch_large(together)
        for _, unit in groupby(sorted(bases, key=_unit), key=_unit):
            self._rebuild_rows(list(unit))

    def _why_not_elsewhere(self, entry: Entry) -> str | None:
        """Return why the object can't be taken from the other store ("" if there is none); None if it can."""
        if self.other is None:
            return ""
        try:
            for part in parts_of_entries([entry]):
                if part.key in self.damages:
                    self.other.read(self.store, part)
        except ObjectDamagedError as error:
            return f"in {self.other.url}, {error.detail}"
        return None

    def _damages_of(self, one: LocatedEntry) -> tuple[Damage, ...]:
        """Return the damage to the entry's object, and to the list of its dead rows."""
        return tuple(self.damages[part.key] for part in parts_of_entries([one.entry]) if part.key in self.damages)

    def _fetch_large(self, together: list[LocatedEntry]) -> None:
        """Plan for objects of one copy task, whose keys have the same beginning.

        The parts of a large object are in consecutive objects, so if one of them gets a new key, all of them do.
        """
        damages = [self.damages[one.entry.key] for one in together]
        if all(damage.kind == MISSING for damage in damages):
            self.steps += [
                RepairStep(Method.PUT_BACK, (one,), (damage,)) for one, damage in zip(together, damages, strict=True)
            ]
            return
        first = together[0]
        keys = {
            stored.key
            for entry in self._commit(first.increment).entries
            if (entry.kind, entry.node) == (LARGE_OBJECTS, first.entry.node)
            for stored in listed_objects(entry)
            if _beginning(stored.key) == _beginning(first.entry.key)
        }
        others = keys - {one.entry.key for one in together}
        if damaged := sorted(others & self.damages.keys()):
            for damage in damages:
                self._give_up(damage, f"object {damaged[0]} has parts of the same large objects, and is damaged, too")
            return
        siblings = locate(self.chain, others, [first.entry.node]).values()
        self.steps.append(RepairStep(Method.FETCH, (*together, *siblings), tuple(damages)))

    def _commit(self, increment: int) -> Commit:
        return next(commit for commit in self.chain.commits if commit.increment == increment)

    def _others(self, node: str) -> list[str]:
        """Return the other nodes of the node's shard, the primary first; none of a shard that was retired."""
        shard = self.chain.shard_of(node)
        if shard in self.chain.retired:
            return []
        nodes = [shard, *(one.node for one in self.chain.nodes if one.backup_of == shard)]
        return [other for other in nodes if other != node]

    def _rebuild_segment(self, one: LocatedEntry, segment: Segment, damage: Damage, why: str) -> None:
        reasons = [why] if why else []
        if one.increment < (begun := self.chain.begun(segment.node)):
            self._give_up(damage, f"the copy of {segment.node} began again with increment {begun}")
            return
        copies: list[str] = []
        for copy in self._others(segment.node):
            try:
                overlapping = find_overlapping(self.chain, segment, copy)
            except NotRebuildableError as error:
                reasons.append(str(error))
                continue
            if damaged := [other.key for other in overlapping if other.key in self.damages]:
                reasons.append(f"neither copy can be trusted: object {damaged[0]} of {copy} is damaged, too")
                continue
            copies.append(copy)
        if copies:
            first, *further = copies
            self.steps.append(RepairStep(Method.REBUILD_SEGMENT, (one,), (damage,), first, further=tuple(further)))
            return
        self._give_up(damage, "; ".join(reasons) or ONE_COPY)

    def _rebuild_rows(self, together: list[LocatedEntry]) -> None:
        damages = [damage for one in together for damage in self._damages_of(one)]
        node, increment = damages[0].node, together[0].increment
        rows = [one.entry.rows for one in together if not isinstance(one.entry, Segment)]
        groups = {number for counts in rows for number, count in counts.items() if count}
        commit = self._commit(increment)
        # In a merge, the other copy may have stored the same tables under other definitions.
        mapping = mapping_of(self.chain, commit, node)
        at_cut_groups = at_cut(groups, mapping)
        reasons: list[str] = []
        copies: list[str] = []
        for copy in self._others(node):
            if groups & self.chain.shared_groups(copy):
                reasons.append(f"the copies of {self.chain.shard_of(copy)} and {copy} begin with the same objects")
                continue
            involved = dict.fromkeys((node, copy, *map(self.chain.base_read_on, (node, copy))))
            begun = max(map(self.chain.begun, involved))
            if begun and increment <= begun:
                reasons.append(f"the copy of {' or '.join(involved)} began again with increment {begun}")
                continue
            bases = [one for one in list_bases(commit, copy) if at_cut(one.groups, mapping) & at_cut_groups]
            damaged = [part.key for part in parts_of_entries(one.stored for one in bases) if part.key in self.damages]
            if damaged:
                reasons.append(f"neither copy can be trusted: object {damaged[0]} of {copy} is damaged, too")
                continue
            absent = self.chain.absent.get(copy)
            if at_cut_groups and not bases and absent is not None and absent.has_ended:
                reasons.append(f"the copy of {copy} has ended, and has none of the rows any more")
                continue
            copies.append(copy)
        if copies:
            definitions = self.chain.definitions(node)
            tables = list_some(sorted({definitions[number].name for number in groups}), TABLES_NAMED_MAX)
            first, *further = copies
            step = RepairStep(Method.REBUILD_ROWS, tuple(together), tuple(damages), first, tables, tuple(further))
            self.steps.append(step)
            return
        for damage in damages:
            self._give_up(damage, "; ".join(reasons) or ONE_COPY)

    def _give_up(self, damage: Damage, why: str) -> None:
        self.unrepairable.append(Unrepairable(damage.key, why))


def _unit(one: LocatedEntry) -> tuple[object, ...]:
    """Return what the objects of base rows that are rebuilt together have in common."""
    return one.entry.node, one.increment, one.part


def _plan_commits(
    fleet: Fleet, store: ObjectStore, identity: StoreIdentity, request: RepairRequest, other: SecondStore
) -> RepairPlan:
    """Plan to put back the commit files that are missing here and belong here; see `_find_commits`."""
    encryption = None if isinstance(stored_form(store), AsWritten) else fleet.store.encryption
    view = encryption.for_tasks(store).over(other.raw) if encryption else other.raw
    commits, unrepairable = _find_commits(store, view, identity, request.name)
    if not commits and not unrepairable:
        # There is no such snapshot in either store, or its commits are all here.
        read_chain(store, request.name, 0)
    return RepairPlan(request, None, 1, commits=tuple(commits), unrepairable=tuple(unrepairable), other=other)


def _find_commits(
    store: ObjectStore, view: ObjectStore, identity: StoreIdentity, name: str
) -> tuple[list[MissingCommit], list[Unrepairable]]:
    """Find the commit files that `view` has and this store lacks.

    Commits of a deleted snapshot or of pruned increments are not missing. Another commit belongs here if a commit in
    this store names its digest, or an operation in this store recorded it: the other store may belong to a fleet that
    went its own way.
    """
    recorded = read_recorded_commits(store, unread=[]).get(name, {})
    named = {
        digest
        for number in {0, *listed_numbers(store, name)}
        for digest in _names_of(_read_present(store, name, number))
    }
    commits: list[MissingCommit] = []
    unrepairable: list[Unrepairable] = []
    check_not_deleted(store, name)
    numbers = {0} if is_only_full(store, name) else {0, *listed_numbers(view, name)}
    for number in sorted(numbers, reverse=True):
        commit = _read_present(view, name, number)
        place = find_place(view, name, number)
        if commit is None or store.exists(place.key):
            continue
        is_recorded = recorded.get(commit.operation) == number
        is_ours = not isinstance(commit, FullSnapshot) or commit.fleet_id == identity.fleet_id
        if not is_ours or not (commit.digest in named or is_recorded):
            why = "nothing in this store shows that the commit in the other store belongs here"
            unrepairable.append(Unrepairable(place.key, why))
            continue
        named |= _names_of(commit)
        commits.append(MissingCommit(place.key, increment_label(name, number), number, commit.digest))
    return commits[::-1], unrepairable[::-1]


def _read_present(store: ObjectStore, name: str, number: int) -> Commit | None:
    """Return the commit; None if it is missing, unreadable, or belongs elsewhere."""
    try:
        commit = find_place(store, name, number).commit
    except (ManifestError, ObjectMissingError):
        return None
    return commit if commit is not None and (commit.snapshot, commit.increment) == (name, number) else None


def _names_of(commit: Commit | None) -> set[str]:
    """Return the digests of the earlier commits that a commit names."""
    if commit is None or isinstance(commit, FullSnapshot):
        return set()
    names = {commit.previous.digest} if commit.previous else set[str]()
    if history := commit.history:
        names |= {history.full, *history.redefinitions.values(), *(summary.digest for summary in history.recent)}
    return names


def step_line(step: RepairStep, url: str) -> str:
    """Describe what a step does."""
    keys = list_some([one.key for one in step.damages], TABLES_NAMED_MAX)
    match step.method:
        case Method.PUT_BACK:
            return f"put back object {keys} from {url}: the same bytes under the same key"
        case Method.FETCH:
            return f"replace object {keys} by the same content from {url}, under a new key"
        case Method.REBUILD_SEGMENT:
            return f"replace segment {keys} of {step.node} by a new one from the archive of {step.copy}"
        case Method.REBUILD_ROWS:
            of = f" with rows of {step.tables}" if step.tables else ""
            return f"replace object {keys} of {step.node}{of} by new ones from the copy of {step.copy}"
