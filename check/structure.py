"""Using commits alone, check that commits fit together, and that archives have no gaps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial

from cutline.check.report import Conflict, Doubt, Skipped, SnapshotReport
from cutline.fleet.messages import list_some
from cutline.nodes.left_out import select_warnings
from cutline.snapshots.ddl.dump import find_ddl
from cutline.snapshots.operations.object_lists import read_chain_lists
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.documents import Kind, ManifestError, parse_key, read_sealed
from cutline.snapshots.records.end_marks import EndMark, end_key, read_marks
from cutline.snapshots.records.merge_records import Begin, begin_key, find_merge, first_increment
from cutline.snapshots.records.merged_chain import MergedAwayError, read_from_merge
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    commit_key,
    find_place,
    increment_numbers,
    increments_pruned_error,
    point_label,
    snapshot_names,
)
from cutline.snapshots.records.store_identity import FLEET_KEY, foreign_snapshot_error
from cutline.snapshots.records.tombstones import (
    SnapshotDeletedError,
    check_not_deleted,
    is_deleted,
    is_only_full,
    only_full_key,
    tombstone_key,
)
from cutline.storage.errors import IndeterminateError, SnapshotError, UnreachableError, UsageError
from cutline.storage.store import ObjectMissingError, ObjectStore

NAMED_MAX = 5


def names_to_check(store: ObjectStore, recorded: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Return every snapshot that exists, and every recorded snapshot that was not deleted."""
    return sorted({*snapshot_names(store), *(name for name in recorded if not _is_known_deleted(store, name))})


def _is_known_deleted(store: ObjectStore, name: str) -> bool:
    with suppress(ManifestError):
        return is_deleted(store, name)
    return False


def check_structure(
    store: ObjectStore, fleet_id: str, name: str, increment: int | None, recorded: Mapping[str, int]
) -> tuple[Chain | None, SnapshotReport]:
    """Read the chain and check that it is complete; return it, or None if it can't be read.

    If the commit of an increment can't be read, the chain that ends before it is returned, and a conflict names the
    commit. `recorded` maps operations to the increments that they recorded as committed. Nothing else would show that
    the last commit file is missing.
    """
    chain, conflicts = _read_intact(store, name, increment, recorded)
    if chain is None:
        report = SnapshotReport(name, increment or 0)
        report.conflicts += conflicts
        return None, report
    is_whole = increment is None and not conflicts
    with_rows = () if chain.full.only_cut else chain.present
    report = SnapshotReport(
        name,
        chain.last.increment,
        append_only=chain.append_only,
        warned=select_warnings(chain.left_out),
        gaps=chain.gaps,
        shards=Counter(map(chain.shard_of, with_rows)),
    )
    report.conflicts += conflicts
    if conflicts:
        following = f"increment {chain.last.increment + 1}"
        report.skipped.append(Skipped(f"{following} of {name} and later", f"the commit of {following} can't be read"))
    marks = read_marks(store, name, chain.full.chain)
    report.conflicts += [Conflict("mark", mark.message, object=mark.key) for mark in marks.damaged]
    if marks.is_only_full and (kept := increment_numbers(store, name)):
        detail = f"the mark says that its increments were removed, but increment {max(kept)} is in the store"
        why = "a prune was interrupted, which gc completes, or somebody changed the store"
        report.doubts.append(Doubt("mark", f"{detail}: {why}", object=only_full_key(name)))
    report.conflicts += _check_beginning(store, chain)
    if marks.ended is not None and not marks.is_only_full:
        _check_mark(store, chain, marks.ended, report, is_whole=is_whole)
    if is_whole and not marks.is_only_full:
        report.conflicts += _check_lost(chain, recorded)
    if chain.full.fleet_id != fleet_id:
        foreign = foreign_snapshot_error(name, chain.full.fleet_id, fleet_id)
        report.conflicts.append(Conflict("fleet", foreign.message, object=FLEET_KEY))
    # The archives of shards that have left the chain end before it does.
    whole = [chain.up_to(one.increment - 1) for one in chain.increments if one.retired]
    checks: list[tuple[str, Callable[[], object]]] = [("archive", part.check_archive) for part in (*whole, chain)]
    with_ddl = () if chain.full.only_cut else chain.primaries
    checks += [("commit", partial(find_ddl, chain, node)) for node in with_ddl]
    for kind, check in checks:
        try:
            check()
        except SnapshotError as error:
            conflict = Conflict(kind, error.message, node=_text(error, "node"), object=_text(error, "object"))
            if conflict not in report.conflicts:
                report.conflicts.append(conflict)
    return chain, report


def _read_intact(
    store: ObjectStore, name: str, increment: int | None, recorded: Mapping[str, int]
) -> tuple[Chain | None, list[Conflict]]:
    """Read the chain up to the first commit that can't be read; return None if no commit precedes it.

    The conflicts name commits that can't be read, the first of them among others.
    """
    conflicts: list[Conflict] = []
    last = increment
    while True:
        try:
            return read_chain_lists(store, read_from_merge(store, name, last)), conflicts
        except MergedAwayError:
            # What lies before the commits that can't be read was given up.
            if conflicts:
                return None, conflicts
            raise
        except (UnreachableError, IndeterminateError, UsageError, SnapshotDeletedError):
            raise
        except SnapshotError as error:
            # If a mark can't be read, `error` says so, and is reported below.
            with suppress(ManifestError):
                check_not_deleted(store, name)
                if increment and is_only_full(store, name):
                    raise increments_pruned_error(name) from error
            if isinstance(error, SnapshotMissingError) and not _was_there(store, name, error, recorded):
                raise
            damaged = _text(error, "object")
            kind = "mark" if damaged in (tombstone_key(name), only_full_key(name)) else "commit"
            conflicts.append(Conflict(kind, error.message, object=damaged))
            key = parse_key(name, damaged) if damaged else None
            number = key.number if key is not None and key.kind is Kind.COMMIT else 0
            if isinstance(error, SnapshotMissingError):
                number = number or int(_text(error, "increment") or 0)
            if not number or (last is not None and number > last):
                return None, conflicts
            last = number - 1


def _check_beginning(store: ObjectStore, chain: Chain) -> Iterator[Conflict]:
    """Compare the mark that the chain begins with a merge for good with the merge, which may not be the newest.

    Other commands need only its key.
    """
    first = first_increment(store, chain.name)
    if not first:
        return
    key = begin_key(chain.name, first)
    try:
        mark: Begin = read_sealed(store, key, Begin)
        place = find_merge(store, chain.name, first)
    except ObjectMissingError:
        # The snapshot has been deleted since the listing.
        return
    except ManifestError as error:
        damaged = _text(error, "object")
        yield Conflict("mark" if damaged == key else "commit", error.message, object=damaged)
        return
    if place.merge is None:
        detail = f"the chain begins with a merge at increment {first} according to its mark, but that does not exist"
        yield Conflict("commit", detail, object=place.key)
    elif (mark.snapshot, mark.increment, mark.chain, mark.merge) != (
        chain.name, first, chain.full.chain, place.merge.digest,
    ):  # fmt: skip
        yield Conflict(
            "mark", f"the mark of the chain's beginning contradicts the merge at increment {first}", object=key
        )


def _check_mark(store: ObjectStore, chain: Chain, mark: EndMark, report: SnapshotReport, *, is_whole: bool) -> None:
    """Compare the mark of an ended chain with its commits; if `is_whole`, the chain was read to its newest increment.

    A mark is stored while no create runs, except by a restore, which may run while a create does.
    """
    key, number, last = end_key(mark.snapshot, mark.chain), mark.after_increment, chain.last.increment
    if is_whole and number > last and find_place(store, chain.name, number).commit is None:
        detail = f"the chain ended after increment {number} according to its mark, but that increment does not exist"
        report.conflicts.append(Conflict("mark", detail, object=key))
    if number < last and not mark.restore:
        detail = f"the chain ended after {point_label(number)} according to its mark, but increment {last} follows"
        report.conflicts.append(Conflict("mark", detail, object=key))
    unknown = sorted({mark.node, *mark.nodes} - chain.parts.keys() - {*map(chain.listed_id, chain.parts)} - {""})
    if unknown:
        detail = f"the mark of the ended chain names {list_some(unknown, NAMED_MAX)}, which is no node of the snapshot"
        why = "it has got another name in the fleet file or a copy of the slot, or somebody changed the store"
        report.doubts.append(Doubt("mark", f"{detail}: {why}", object=key))


def _check_lost(chain: Chain, recorded: Mapping[str, int]) -> list[Conflict]:
    # Ids from different seconds sort by time. Operations that are older than the full snapshot belong to an earlier
    # chain.
    second = chain.stored_full.operation.rpartition("-")[0]
    numbers = {number for operation, number in recorded.items() if operation >= second}
    return [
        Conflict(
            "missing",
            f"increment {number} was committed, but its commit file is missing",
            object=commit_key(chain.name, number),
        )
        for number in sorted(numbers)
        if number > chain.last.increment
    ]


def _was_there(store: ObjectStore, name: str, missing: SnapshotMissingError, recorded: Mapping[str, int]) -> bool:
    """Whether the missing commit once existed: a later commit exists, or an operation recorded it as committed."""
    if "increment" not in missing.details:
        # The increments have been pruned in the meantime.
        return False
    number = int(str(missing.details["increment"]))
    if number < max(increment_numbers(store, name), default=-1):
        return True
    # A recorded increment implies all before it, and a full snapshot; gc removes the records of earlier increments.
    return number <= max(recorded.values(), default=-1)


def _text(error: SnapshotError, name: str) -> str | None:
    value = error.details.get(name)
    return str(value) if value is not None else None
