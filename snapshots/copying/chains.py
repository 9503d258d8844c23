"""Copy one snapshot with its increments to a second store, except for objects that it has, in this order.

1. All objects that a commit lists, each verified by its digest as it is read.
2. The repairs of the chain. A reader ignores those of commits that are not there. If both stores were repaired
   independently, the second keeps its own repairs; of the first store's repairs, it gets the replacements in the
   restore points that it lacks.
3. The commit. From here on, the restore point exists in the second store.
4. The merges at the increment, each after the objects that it lists. A merge that the second store has made itself at
   the same increment stays.
5. The records of the operations that own the objects, by which gc recognises them.

If the first store has given up the restore points before a merge, their objects may be gone. A second store that has
nothing of the snapshot then begins with the merge: it gets the merge's objects, the merge, the mark, the commits up to
its increment, and last the full snapshot's, without which the snapshot does not exist there. A second store that has
some of the earlier restore points, but not all, can't be continued: the mark would give up those that it has.

Increments follow in order, so if a copy dies, the second store contains an earlier state of the chain, and perhaps
objects that no commit lists yet. Every object is created by a conditional put and never overwritten, so copies that run
at the same time store the same objects. A damaged object ends the copy of its chain before the commit that lists it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from enum import StrEnum
from typing import NamedTuple, TypeVar

from msgspec import Struct, field, structs
from msgspec.structs import replace

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.snapshots.copying.second_store import CopyPlace, StorePair, open_pair, preview_pair
from cutline.snapshots.operations.object_lists import lost_list_error, read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, LostList
from cutline.snapshots.records.documents import ManifestError, seal, unseal
from cutline.snapshots.records.end_marks import end_key, has_end
from cutline.snapshots.records.merge_records import (
    Merge,
    begin_key,
    find_merge,
    first_increment,
    merge_key,
    merge_numbers,
    newest_merge,
    read_merges,
)
from cutline.snapshots.records.merged_chain import begin_with, read_from_merge
from cutline.snapshots.records.operation_records import operation_key, read_intent, read_outcome
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    check_name,
    commit_key,
    cut_time,
    find_place,
    increment_label,
    increment_numbers,
    point_label,
    read_as_committed,
    read_full,
    read_part_at,
    read_readable_part,
    snapshot_names,
)
from cutline.snapshots.records.repair_records import (
    Repair,
    Replacement,
    next_repair_number,
    read_repair,
    read_repairs,
    repair_key,
)
from cutline.snapshots.records.repaired_chain import apply_repairs, with_repairs
from cutline.snapshots.records.tombstones import SnapshotDeletedError, is_deleted, is_known_only_full, is_only_full
from cutline.snapshots.removal.survey import SizeTotal
from cutline.storage.errors import RefusedError, SnapshotError
from cutline.storage.store import ObjectExistsError, ObjectMissingError
from cutline.storage.stored_form import UndecryptableError
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

# The memory for objects on their way, unless a single object needs more.
BYTES_MAX = 256 << 20
THREADS_MAX = 8
BASELINES = "baselines"
# The kind of a problem whose objects were removed because the restore points that need them were given up.
GIVEN_UP = "given-up"


class CopyCrashPoint(StrEnum):
    """The effects of a copy after which a process may die, in order."""

    OBJECT_STORED = "object copied"
    REPAIRS_STORED = "repairs copied"
    COMMITTED = "commit copied"
    MERGED = "merge copied"
    RECORDED = "records copied"


class OtherChainError(RefusedError):
    """The second store has another snapshot or increment under the same name, or one that can't be read."""


class WantedObject(NamedTuple):
    """An object to copy: its key, its node, the stored size in bytes and the digest by which the commit lists it."""

    key: str
    node: str
    size: int
    digest: str


class CopyProblem(Struct, frozen=True):
    """Why something was not copied. `key` is the object, and `increment` the first commit that was not copied.

    `hint` says what to do, unless the object is damaged and must be repaired.
    """

    key: str
    kind: str
    node: str
    increment: int
    detail: str
    hint: str = ""


class SnapshotCopy(Struct):
    """The result of copying one snapshot or, in a dry run, the preview of the result.

    `newest` is the newest restore point in the first store, None if unknown. `through` is the newest in the second
    store, None if it has none, and `cut_at` the time of its cut. `increments` are the restore points that this copy
    added; 0 is the full snapshot. `merges` are the increments whose merges it added, and `first` is the first restore
    point that can be copied, unless the second store has earlier ones. `copied` and `present` count objects that
    commits, repairs or merges list: those copied, and those of the same commits that the second store already had.
    `left_out` says why the snapshot was not copied, if it was deleted in one of the stores.
    """

    name: str
    newest: int | None = None
    first: int = 0
    through: int | None = None
    cut_at: Time | None = None
    increments: list[int] = field(default_factory=list)
    merges: list[int] = field(default_factory=list)
    copied: SizeTotal = field(default_factory=SizeTotal)
    present: SizeTotal = field(default_factory=SizeTotal)
    problems: list[CopyProblem] = field(default_factory=list)
    left_out: str = ""

    @property
    def next_increment(self) -> int:
        """The first restore point that the second store lacks."""
        return self.first if self.through is None else self.through + 1

    @property
    def behind(self) -> int:
        """The number of restore points that the second store lacks."""
        if self.newest is None or self.left_out:
            return 0
        return self.newest + 1 - self.next_increment


class ChainPlan(Struct, frozen=True):
    """The missing restore points of a chain, oldest first, and the repairs that the second store lacks, by number.

    The commits of `chain` that are missing list the objects that readers need once the repairs are applied.
    `operations` are those of the first store's repairs. If the second store was repaired by itself, `own_repairs` are
    those, and `repairs` are the numbers of `added`, which are put behind them. `merges` are the increments whose merges
    the second store lacks. If `begins` is set, the second store has nothing of the snapshot, and begins with the merge
    of increment `first`, before which the first store has given up all restore points. If `is_blocked`, nothing can be
    copied.
    """

    chain: Chain
    missing: tuple[Commit, ...]
    repairs: tuple[int, ...]
    operations: tuple[str, ...] = ()
    own_repairs: tuple[Repair, ...] = ()
    added: tuple[Repair, ...] = ()
    merges: tuple[int, ...] = ()
    first: int = 0
    begins: bool = False
    is_blocked: bool = False
    problems: tuple[CopyProblem, ...] = ()

    def wanted(self, pair: StorePair, commit: Commit) -> Iterator[WantedObject]:
        """Yield the objects that the commit lists; raise ObjectDamagedError if an object list is lost."""
        stored_size = pair.source.stored_size
        for object_list in commit.object_lists:
            if isinstance(object_list, LostList):
                raise lost_list_error(object_list)
        for entry in commit.named_and_listed:
            yield WantedObject(entry.key, entry.node, stored_size(entry.size), entry.digest)

    def wanted_by_merge(self, pair: StorePair, merge: Merge) -> Iterator[WantedObject]:
        """Yield the objects with which the merged chain begins; raise ObjectDamagedError or ManifestError."""
        chain = begin_with(read_part_at(pair.first, merge.snapshot, merge.increment), merge)
        if not self.own_repairs:
            return self.wanted(pair, read_chain_lists(pair.first, with_repairs(pair.first, chain)).full)
        chain = apply_repairs(chain, (*self.own_repairs, *self.added))
        full = read_chain_lists(pair.first, chain).full
        # The second store has its own repairs' object lists, and lists that are lost in the first.
        lost = {one.key for one in full.lists if isinstance(one, LostList)}
        kept = tuple(one for one in full.lists if one.key not in lost)
        there = structs.replace(chain.full, lists=tuple(one for one in chain.full.lists if one.key in lost))
        found = read_chain_lists(pair.second, replace(chain, full=there)).full.lists
        return self.wanted(pair, structs.replace(full, lists=(*kept, *found)))

    def wanted_by_repairs(self, pair: StorePair) -> Iterator[WantedObject]:
        """Yield the objects of the missing repairs that commits in the second store already need."""
        first, stored_size = self.missing[0].increment if self.missing else None, pair.source.stored_size
        there = {
            entry.key
            for commit in self.chain.commits
            if self.repairs and (first is None or commit.increment < first)
            for entry in commit.named
        }
        for repair in self.chain.applied.repairs:
            for replacement in repair.replacements:
                if repair.number in self.repairs:
                    is_needed = first is None or replacement.increment < first
                    for entry in replacement.new:
                        # What a merge lists may be listed by earlier commits, too.
                        if is_needed or entry.key in there:
                            yield WantedObject(entry.key, entry.node, stored_size(entry.size), entry.digest)


def plan_chain(pair: StorePair, name: str) -> ChainPlan:
    """Find the parts of the snapshot that the second store lacks.

    Raises SnapshotDeletedError, SnapshotMissingError, ManifestError if no commit can be read, and OtherChainError.
    """
    problems: list[CopyProblem] = []
    try:
        chain = read_as_committed(pair.first, check_name(name))
    except (ManifestError, SnapshotMissingError) as error:
        chain = read_readable_part(pair.first, name)
        number = chain.last.increment + 1
        key = str(error.details.get("object") or commit_key(name, number))
        problems.append(CopyProblem(key, "commit", "", number, error.message))
    first = first_increment(pair.first, name)
    if not pair.is_new and is_only_full(pair.second, name):
        chain, first = Chain(chain.full), 0
    try:
        there = [] if pair.is_new else _copied_numbers(pair, name)
        if first and 0 not in there:
            # A copy that began with a merge has died before the full snapshot's commit.
            there = []
        _check_same(pair, chain, there)
        repairs = _missing_repairs(pair, name, first if there else 0)
        own_repairs = read_repairs(pair.second, name) if repairs is None else ()
    except ManifestError as error:
        raise OtherChainError(
            f"store {pair.second.url} can't be compared with {pair.first.url}: {error.message}",
            hint="check the snapshot with the second store's fleet file, and put the object back from the first store",
            details={**error.details, "snapshot": name, "store": pair.second.url},
        ) from error
    applied = read_repairs(pair.first, name)
    operations, added = tuple(repair.operation for repair in applied), tuple[Repair, ...]()
    merges, damaged = _missing_merges(pair, chain, first)
    if repairs is None:
        lacking = {commit.increment for commit in chain.commits}.difference(there)
        added = _repairs_to_add(pair, name, own_repairs, applied, lacking, merges)
        repairs = tuple(repair.number for repair in added)
        # A copy that died has added some of them already.
        applied = (*(one for one in own_repairs if one.operation in operations), *added)
    chain = read_chain_lists(pair.first, apply_repairs(chain, applied))
    missing = tuple(commit for commit in chain.commits if commit.increment not in there)
    plan = ChainPlan(chain, missing, repairs, operations, own_repairs, added, first=first)
    if there and there[-1] < first:
        problems = [_gap_problem(pair, name, there[-1], first)]
        return replace(plan, is_blocked=True, problems=tuple(problems))
    if not there and chain.last.increment < first:
        return replace(plan, is_blocked=True, problems=tuple(problems))
    return replace(plan, merges=merges, begins=bool(first) and not there, problems=(*problems, *damaged))


def _gap_problem(pair: StorePair, name: str, last: int, first: int) -> CopyProblem:
    detail = (
        f"{pair.second.url} has the restore points of {name} up to {point_label(last)}, but those after it and before"
        f" increment {first} were given up in {pair.first.url} before they were copied"
    )
    hint = (
        f"the restore points there stay; to copy those from increment {first} on, name an empty folder:"
        f" snapshot copy {name} --to URL"
    )
    return CopyProblem(begin_key(name, first), GIVEN_UP, "", last + 1, detail, hint)


def _missing_merges(pair: StorePair, chain: Chain, first: int) -> tuple[tuple[int, ...], list[CopyProblem]]:
    """Return the increments whose merges the second store lacks, and the merges that can't be read.

    Merges before the beginning of the chain in either store are of no use. A merge whose turn was voided in the second
    store is left out: gc finds the merge of an operation by its turn.
    """
    begin = max(first, 0 if pair.is_new else first_increment(pair.second, chain.name))
    merges: list[int] = []
    problems: list[CopyProblem] = []
    for number in merge_numbers(pair.first, chain.name):
        if not begin <= number <= chain.last.increment:
            continue
        try:
            place = find_merge(pair.first, chain.name, number)
            there = None if pair.is_new else find_merge(pair.second, chain.name, number)
        except ManifestError as error:
            key = str(error.details.get("object") or merge_key(chain.name, number))
            problems.append(CopyProblem(key, "document", "", number, error.message))
            continue
        is_there = there is not None and (there.merge is not None or there.turn > place.turn)
        if place.merge is not None and not is_there:
            merges.append(number)
    return tuple(merges), problems


def _copied_numbers(pair: StorePair, name: str) -> list[int]:
    """Return the restore points that the second store has, in order; 0 is the full snapshot."""
    full = [0] if find_place(pair.second, name, 0).commit is not None else []
    return [*full, *increment_numbers(pair.second, name)]


def _check_same(pair: StorePair, chain: Chain, there: Sequence[int]) -> None:
    """Raise OtherChainError unless the newest commit that both stores have is the same one."""
    common = [commit for commit in chain.commits if commit.increment in there]
    if not common:
        return
    newest = common[-1]
    found = find_place(pair.second, chain.name, newest.increment).commit
    if found is None or found.digest != newest.digest:
        raise OtherChainError(
            f"store {pair.second.url} has another {increment_label(chain.name, newest.increment)} than"
            f" {pair.first.url}",
            hint=f"delete it there: snapshot --fleet FILE delete {chain.name}   or copy into an empty folder:"
            f" snapshot copy {chain.name} --to URL",
            details={"snapshot": chain.name, "increment": newest.increment, "store": pair.second.url},
        )


def _missing_repairs(pair: StorePair, name: str, first: int) -> tuple[int, ...] | None:
    """Return the numbers of the repairs that the second store lacks; None if it was repaired by itself.

    If it lacks a repair of restore points before `first`, it also goes on by itself: it keeps these restore points with
    its own objects, because those of the repair were given up with them.
    """
    numbers = range(1, next_repair_number(pair.first, name))
    missing = []
    for number in numbers:
        try:
            found = None if pair.is_new else read_repair(pair.second, name, number)
        except ObjectMissingError:
            found = None
        repair = read_repair(pair.first, name, number)
        if found is None:
            if isinstance(repair, Repair) and any(_is_before(one, first) for one in repair.replacements):
                return None
            missing.append(number)
        elif found != repair:
            return None
    own = 0 if pair.is_new else next_repair_number(pair.second, name) - 1
    return None if own > len(numbers) else tuple(missing)


def _is_before(replacement: Replacement, first: int) -> bool:
    """Return whether the replaced objects are those of a commit or merge before the chain's beginning at `first`."""
    return replacement.increment < first or (replacement.increment == first > 0 and not replacement.merge)


def _repairs_to_add(
    pair: StorePair,
    name: str,
    own: Sequence[Repair],
    of_first: Iterable[Repair],
    missing: Set[int],
    merges: Collection[int],
) -> tuple[Repair, ...]:
    """Return the first store's repairs as they follow the second store's `own`, without those that it does not need.

    It needs what they replace in the `missing` commits and `merges`; of the others it has the objects, or has repaired
    them itself. The repairs keep their operations, to which their objects belong.
    """

    def is_needed(replacement: Replacement) -> bool:
        return replacement.increment in (merges if replacement.merge else missing)

    known, number = {one.operation for one in own}, next_repair_number(pair.second, name)
    previous = own[-1].digest if own else ""
    added: list[Repair] = []
    for repair in of_first:
        replacements = tuple(filter(is_needed, repair.replacements))
        if repair.operation in known or not replacements:
            continue
        new = structs.replace(repair, number=number, previous=previous, replacements=replacements, digest="")
        _, previous = unseal(repair_key(name, number), seal(new))
        added.append(structs.replace(new, digest=previous))
        number += 1
    return tuple(added)


def _copy_chain(pair: StorePair, result: SnapshotCopy, progress: Progress, *, is_dry: bool) -> None:
    """Copy what the second store lacks of the result's snapshot, or with `is_dry` only count it.

    What was done, and problems with objects, are in the result, however this ends. Raises SnapshotDeletedError,
    SnapshotMissingError, OtherChainError, and the errors of both stores, such as StoreUnreachableError.
    """
    name = result.name
    try:
        if not pair.is_new and is_deleted(pair.second, name):
            result.left_out = f"it was deleted in {pair.second.url}"
            return
        plan = plan_chain(pair, name)
        _note_state(plan, result)
        result.problems.extend(plan.problems)
        if not plan.is_blocked:
            _ChainCopy(pair, plan, result, progress, is_dry=is_dry).run()
            _note_given_up(pair, plan, result)
    # A document is missing if the snapshot is removed between two reads.
    except (ManifestError, ObjectDamagedError, ObjectExistsError, ObjectMissingError) as error:
        key, kind, node = (str(error.details.get(detail) or "") for detail in ("object", "kind", "node"))
        detail = error.detail if isinstance(error, ObjectDamagedError) else error.message
        result.problems.append(CopyProblem(key, kind or "document", node, result.next_increment, detail))
    if result.problems and _is_gone(pair, result):
        result.problems.clear()


def _note_state(plan: ChainPlan, result: SnapshotCopy) -> None:
    """Note the newest restore point in each store, before anything is copied."""
    result.newest = max(plan.chain.last.increment, *(problem.increment for problem in plan.problems), 0)
    result.first = plan.first if plan.begins else 0
    missing = {commit.increment for commit in plan.missing}
    for commit in plan.chain.commits:
        if commit.increment in missing:
            return
        result.through, result.cut_at = commit.increment, commit.cut.made_at


def _note_given_up(pair: StorePair, plan: ChainPlan, result: SnapshotCopy) -> None:
    """Replace problems whose cause is that restore points were given up in the first store while they were copied."""
    first = first_increment(pair.first, result.name)
    if first > plan.first and any(problem.increment <= first for problem in result.problems):
        detail = f"restore points before increment {first} were given up in {pair.first.url} while they were copied"
        hint = f"copy it again: snapshot copy {result.name}"
        key = begin_key(result.name, first)
        result.problems[:] = [CopyProblem(key, GIVEN_UP, "", result.next_increment, detail, hint)]


def _is_gone(pair: StorePair, result: SnapshotCopy) -> bool:
    """Whether objects are missing because the snapshot, or its increments, were removed meanwhile."""
    with suppress(ManifestError):
        if is_deleted(pair.first, result.name):
            result.left_out = f"it was deleted in {pair.first.url} while it was copied"
        elif is_known_only_full(pair.first, result.name) and result.through is not None:
            result.left_out = f"its increments were pruned in {pair.first.url} while they were copied"
    return bool(result.left_out)


class _ChainCopy(Struct):
    pair: StorePair
    plan: ChainPlan
    result: SnapshotCopy
    progress: Progress
    is_dry: bool
    # The objects that the second store has, with their sizes.
    there: dict[str, int] = field(default_factory=dict)
    records: set[str] = field(default_factory=set)

    def run(self) -> None:
        plan = self.plan
        if not (self.pair.is_new or (not plan.missing and not plan.repairs and not plan.merges)):
            self._list_present()
        if plan.repairs:
            if not self._copy_objects(plan.wanted_by_repairs(self.pair), "repairs"):
                return
            self._copy_repairs()
        if plan.begins and not self._copy_beginning():
            return
        begin = plan.first + 1 if plan.begins else 0
        missing = tuple(commit for commit in plan.missing if commit.increment >= begin)
        for number in plan.merges:
            if begin <= number < (missing[0].increment if missing else plan.chain.last.increment + 1):
                self._copy_merge(number)
        if not self._copy_commits(missing):
            return
        if not self.is_dry:
            self._copy_mark()
            self._copy_records()

    def _copy_commits(self, missing: Iterable[Commit]) -> bool:
        """Copy the commits with their objects and merges, up to the first with a problem; return False as _commit."""
        for commit in missing:
            label = increment_label(self.plan.chain.name, commit.increment)
            if not self._copy_objects(self.plan.wanted(self.pair, commit), label):
                self._hint_at_merge(commit)
                break
            if not self._commit(commit):
                return False
            if commit.increment in self.plan.merges:
                self._copy_merge(commit.increment)
        return True

    def _hint_at_merge(self, commit: Commit) -> None:
        """Say so if no restore point from the newest merge on needs the damaged objects: a repair does not see them."""
        name = commit.snapshot
        with suppress(RefusedError):
            merge = newest_merge(self.pair.first, name)
            if merge is None or commit.increment > merge.increment:
                return
            chain = read_chain_lists(self.pair.first, read_from_merge(self.pair.first, name))
            needed = {entry.key for one in chain.commits for entry in one.named_and_listed}
            hint = (
                f"only restore points before increment {merge.increment} need the object; to give them up:"
                f" snapshot merge {name} --to {merge.increment} --drop-earlier   then copy it again"
            )
            self.result.problems[:] = [
                one if one.hint or one.key in needed else replace(one, hint=hint) for one in self.result.problems
            ]

    def _copy_objects(self, wanted: Iterable[WantedObject], label: str) -> bool:
        """Copy the objects that are missing; return whether none of them is damaged. Add problems to the result."""
        missing: list[WantedObject] = []
        for one in wanted:
            if one.key not in self.there:
                missing.append(one)
                continue
            if self.there[one.key] != one.size:
                raise ObjectExistsError(url=self.pair.second.url, key=one.key)
            self.result.present.add(one.size)
        if self.is_dry:
            for one in missing:
                self.there[one.key] = one.size
                self.result.copied.add(one.size)
            return True
        if not missing:
            return True
        self.progress.step(f"copy {label}", total=sum(one.size for one in missing), unit="bytes")
        damaged = list[CopyProblem]()
        for one, problem in _in_threads(missing, self._copy_object):
            self.progress.advance(one.size)
            if problem is not None:
                damaged.append(problem)
                continue
            self.there[one.key] = one.size
            self.result.copied.add(one.size)
            self.progress.reached(CopyCrashPoint.OBJECT_STORED)
        self.result.problems += sorted(damaged, key=lambda problem: problem.key)
        return not damaged

    def _copy_object(self, one: WantedObject) -> CopyProblem | None:
        try:
            body = read_listed(self.pair.source.raw, one.node, one.key, (one.size, one.digest))
        except ObjectDamagedError as error:
            return CopyProblem(one.key, error.kind, one.node, self.result.next_increment, error.detail)
        create_or_find(self.pair.target, one.key, body)
        return None

    def _commit(self, commit: Commit) -> bool:
        """Copy the commit; return False, and say why in the result, if it was removed in the second store meanwhile."""
        if not self.is_dry:
            if not self._store_commit(commit):
                return False
            self.progress.reached(CopyCrashPoint.COMMITTED)
            self.result.through, self.result.cut_at = commit.increment, commit.cut.made_at
        self.result.increments.append(commit.increment)
        return True

    def _store_commit(self, commit: Commit) -> bool:
        name, number = self.plan.chain.name, commit.increment
        # The mark of a removal there counts even if it is stored after this.
        if is_deleted(self.pair.second, name) or (number and is_only_full(self.pair.second, name)):
            self.result.left_out = f"it was removed in {self.pair.second.url} while it was copied"
            return False
        place = find_place(self.pair.first, name, number)
        if place.commit is None or place.commit.digest != commit.digest:
            raise ObjectDamagedError(key=place.key, kind="missing", node="", detail="the commit is gone")
        for turn in range(1, place.turn + 1):
            _copy_document(self.pair, commit_key(name, number, turn))
        return True

    def _list_present(self) -> None:
        name = self.plan.chain.name
        self.there = {one.key: one.size for one in self.pair.target.inventory(f"snapshots/{name}")}

    def _copy_merge(self, number: int) -> None:
        """Copy the merge at an increment that the second store has; if an object is damaged, it does without it."""
        name = self.plan.chain.name
        merge = find_merge(self.pair.first, name, number).merge
        if merge is None:
            return
        if not self.is_dry and not self.pair.is_new:
            # A removal in the second store may have removed objects that this merge carries.
            self._list_present()
        try:
            wanted = self.plan.wanted_by_merge(self.pair, merge)
            # Those that it carries have been counted with the commits.
            new = [one for one in wanted if self.there.get(one.key) != one.size]
            is_complete = self._copy_objects(new, f"the merge at {increment_label(name, number)}")
        except ObjectDamagedError as error:
            problem = CopyProblem(error.key, error.kind, error.node, number, error.detail)
            self.result.problems.append(problem)
            return
        if is_complete:
            if not self.is_dry:
                self._copy_merge_documents(number)
            self.result.merges.append(number)

    def _copy_merge_documents(self, number: int) -> None:
        """Copy the merge with the voids before it, unless the second store has a merge of its own there."""
        name = self.plan.chain.name
        there, place = find_merge(self.pair.second, name, number), find_merge(self.pair.first, name, number)
        if place.merge is None or there.merge is not None:
            return
        for turn in range(there.turn, place.turn + 1):
            _copy_document(self.pair, merge_key(name, number, turn))
        self.progress.reached(CopyCrashPoint.MERGED)

    def _copy_beginning(self) -> bool:
        """Copy the merge with which the chain begins for good, and the commits up to it; return whether it is complete.

        The full snapshot's commit comes last: the snapshot does not exist in the second store before.
        """
        plan, name, first = self.plan, self.plan.chain.name, self.plan.first
        merge = find_merge(self.pair.first, name, first).merge
        if merge is None:
            raise ObjectDamagedError(key=merge_key(name, first), kind="missing", node="", detail="the merge is gone")
        if not self._copy_objects(plan.wanted_by_merge(self.pair, merge), increment_label(name, first)):
            return False
        if not self.is_dry:
            for number in merge_numbers(self.pair.first, name):
                # By those before it, gc recognises the objects that it carries.
                if number <= first:
                    self._copy_merge_documents(number)
            _copy_document(self.pair, begin_key(name, first))
            for commit in reversed(plan.chain.up_to(first).commits):
                if not self._store_commit(commit):
                    return False
            self.progress.reached(CopyCrashPoint.COMMITTED)
            self.result.through, self.result.cut_at = first, plan.chain.up_to(first).last.cut.made_at
        self.result.increments.append(first)
        self.result.merges.append(first)
        return True

    def _copy_repairs(self) -> None:
        if self.is_dry:
            return
        added = {repair.number: repair for repair in self.plan.added}
        for number in self.plan.repairs:
            key = repair_key(self.plan.chain.name, number)
            if number in added:
                create_or_find(self.pair.second, key, seal(added[number]))
            else:
                _copy_document(self.pair, key)
        self.progress.reached(CopyCrashPoint.REPAIRS_STORED)

    def _copy_mark(self) -> None:
        """Copy the mark of an ended chain, so that `list` says why nothing follows.

        Not before the second store has all restore points: for gc, segments after the last one would be garbage, among
        them those that this copy has stored and the next one expects.
        """
        if self.result.behind:
            return
        full = self.plan.chain.full
        key = end_key(full.snapshot, full.chain)
        if has_end(self.pair.first, full.snapshot, full.chain) and not self.pair.target.exists(key):
            _copy_document(self.pair, key)

    def _copy_records(self) -> None:
        """Copy the intents and outcomes of operations that own objects of the chain, also those of an earlier copy.

        The outcome comes first: an intent without an outcome is an open operation.
        """
        chain, through = self.plan.chain, self.result.next_increment
        commits = [one for one in chain.commits if one.increment < through and (not one.increment or one.entries)]
        repairs = self.plan.operations
        merges = [one.operation for one in self._merges_there()]
        # The newest of each comes last, so if it is there, all are.
        newest = [*(one.operation for one in commits[-1:]), *repairs[-1:], *merges]
        if all(self.pair.target.exists(operation_key(owner, "intent")) for owner in newest):
            return
        there = set(self.pair.target.list_children("operations"))
        for owner in (*(one.operation for one in commits), *repairs, *merges):
            if owner in there and self.pair.target.exists(operation_key(owner, "intent")):
                continue
            with suppress(ManifestError, ObjectMissingError):
                intent, outcome = read_intent(self.pair.first, owner), read_outcome(self.pair.first, owner)
                if outcome is not None and intent.operation == owner:
                    for kind in ("outcome", "intent"):
                        _copy_document(self.pair, operation_key(owner, kind))
        self.progress.reached(CopyCrashPoint.RECORDED)

    def _merges_there(self) -> list[Merge]:
        with suppress(ManifestError):
            return list(read_merges(self.pair.second, self.plan.chain.name))
        return []


def _copy_document(pair: StorePair, key: str) -> None:
    """Copy a document, whose bytes contain their own digest; raise ManifestError if they have changed."""
    raw = pair.source.raw
    stored = raw.read_range(key, 0, max(raw.size(key), 1))
    try:
        unseal(key, pair.source.decode(key, stored))
    except UndecryptableError as error:
        raise ManifestError(error.message, hint=error.hint, details=error.details) from None
    create_or_find(pair.target, key, stored)


def _copy_primaries(pair: StorePair) -> ManifestError | None:
    """Copy the records of the fleet's primaries, with which `check` compares the chains; return the first damage."""
    there, damage = set(pair.target.list(BASELINES)), None
    for key in pair.source.raw.list(BASELINES):
        if key not in there:
            try:
                _copy_document(pair, key)
            except ManifestError as error:
                damage = damage or error
    return damage


T = TypeVar("T")


def _in_threads(wanted: Sequence[WantedObject], work: Callable[[WantedObject], T]) -> Iterator[tuple[WantedObject, T]]:
    """Do the work on each object in threads, with at most BYTES_MAX of objects at a time; yield the results.

    Raises the first error after the objects in progress are done.
    """
    running: dict[Future[T], WantedObject] = {}
    threads = ThreadPoolExecutor(THREADS_MAX)

    def finish() -> Iterator[tuple[WantedObject, T]]:
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for one in done:
            yield running.pop(one), one.result()

    try:
        for one in wanted:
            while running and (
                len(running) >= THREADS_MAX or sum(each.size for each in running.values()) + one.size > BYTES_MAX
            ):
                yield from finish()
            running[threads.submit(work, one)] = one
        while running:
            yield from finish()
    finally:
        threads.shutdown(cancel_futures=True)


def names_to_copy(pair: StorePair) -> list[str]:
    """Return the first store's snapshots, the newest first; those whose commit can't be read are last."""

    def age(name: str) -> float:
        try:
            return -cut_time(read_full(pair.first, name)).timestamp()
        except SnapshotError:
            return 0.0

    return sorted(snapshot_names(pair.first), key=age)


class StoreCopy(Struct):
    """The result of a copy: for each snapshot, what was copied, or would be (`is_dry`).

    If the copy ends with an error, it contains what was done before. `damaged_record` describes a damaged record of the
    primaries; "" if there is none.
    """

    url: str
    is_dry: bool
    snapshots: list[SnapshotCopy] = field(default_factory=list)
    seconds: float = 0.0
    damaged_record: str = ""

    @property
    def problems(self) -> list[CopyProblem]:
        """The problems of all snapshots."""
        return [problem for one in self.snapshots for problem in one.problems]

    def total(self, count: Callable[[SnapshotCopy], int]) -> int:
        """Return a sum over the snapshots."""
        return sum(count(one) for one in self.snapshots)


def copy_snapshots(
    fleet: Fleet, place: CopyPlace, name: str | None, progress: Progress, report: StoreCopy
) -> StoreCopy:
    """Copy one snapshot, or with None all of them, the newest first; add the results to the report.

    If one snapshot is damaged, or differs from that of the second store, the others are still copied. Raises the errors
    of `open_pair`, SnapshotDeletedError and SnapshotMissingError if the named snapshot does not exist, the errors of
    both stores and, after everything else is copied, ManifestError if a record of the primaries is damaged.
    """
    began = time.monotonic()
    progress.step("compare the stores")
    if name is not None:
        check_name(name)
    pair = (preview_pair if report.is_dry else open_pair)(fleet, place)
    damage = None if report.is_dry else _copy_primaries(pair)
    report.damaged_record = damage.message if damage is not None else ""
    for each in [name] if name is not None else names_to_copy(pair):
        report.snapshots.append(SnapshotCopy(each))
        try:
            _copy_chain(pair, report.snapshots[-1], progress, is_dry=report.is_dry)
        except (OtherChainError, SnapshotDeletedError, SnapshotMissingError) as error:
            if name is not None:
                raise
            report.snapshots[-1] = _not_copied(each, error)
    report.seconds = time.monotonic() - began
    if damage is not None:
        raise damage
    return report


def _not_copied(name: str, error: RefusedError) -> SnapshotCopy:
    if isinstance(error, SnapshotDeletedError):
        return SnapshotCopy(name, left_out=error.message)
    key = str(error.details.get("object") or commit_key(name, 0))
    return SnapshotCopy(name, problems=[CopyProblem(key, "commit", "", 0, error.message)])
