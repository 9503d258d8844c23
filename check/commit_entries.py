"""Check the facts that each commit of a chain states about itself: cut, operations of objects, groups, left-out parts.

The rules that decide how rows are read are checked whenever a commit is read (snapshots/records/proven_chains.py).
Those here follow from how a commit is made. If one is broken, the store was changed, but a restore does not depend on
it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from itertools import pairwise

from cutline.check.report import Conflict, Doubt, Findings
from cutline.check.times import SLACK_SECONDS
from cutline.fleet.messages import list_some
from cutline.fleet.table_names import is_included, is_matching
from cutline.nodes.left_out import LeftOutKind, append_only_of
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import (
    BASE,
    LARGE_OBJECTS,
    Commit,
    StoredObject,
    count_by_node,
    list_large_objects,
)
from cutline.snapshots.records.commit_rules import operations_of
from cutline.snapshots.records.documents import base_prefix, ddl_prefix
from cutline.snapshots.records.proven_chains import commit_key
from cutline.storage.ids import time_of_id
from cutline.wal.segments.archive import Segment

NAMED_MAX = 5
RESUMED_RUN = re.compile(r"\.r[1-9]\d{0,8}\.")


def check_entries(chain: Chain, findings: Findings) -> None:
    """Report a conflict for everything in the chain's commits that no create writes.

    Objects that a repair has stored belong to the repair's operation, which was checked when the repair was applied.
    """
    append_only, repaired = append_only_of({}), chain.applied.new_keys
    for number, commit in enumerate(chain.commits):
        if number == 0 or commit.definition_changes:
            append_only = append_only_of(chain.up_to(commit.increment).all_groups)
        before = chain.commits[number - 1] if number else None
        # A wrong warning that increments repeat is one finding, that of the full snapshot.
        repeats_large = bool(number) and _large_objects_of(commit) == _large_objects_of(chain.full)
        problems = [
            *(("cut", detail) for detail in _check_cut(commit)),
            *(("operation", detail) for detail in _check_objects(chain, commit, repaired)),
            *(("left-out", detail) for detail in _check_left_out(chain, commit, repeats_large=repeats_large)),
        ]
        # The beginning of a merged chain lists what several operations stored.
        for doubt in () if commit is chain.full and chain.beginning else _note_operations(before, commit, repaired):
            findings.doubt(doubt)
        named = {(out.node, out.name) for out in commit.left_out if out.kind == LeftOutKind.APPEND_ONLY_TABLE}
        if named != (expected := {(out.node, out.name) for out in append_only}):
            names = sorted(f"{name} on {node}" for node, name in named ^ expected)
            problems.append(
                ("left-out", f"it names other append-only tables than it lists: {list_some(names, NAMED_MAX)}")
            )
        for kind, detail in problems:
            findings.conflict(Conflict(kind, detail, object=commit_key(chain.name, commit.increment)))
    for shard, detail in _check_rules(chain):
        findings.conflict(Conflict("rules", detail, node=shard, object=commit_key(chain.name, 0)))
    for node in chain.parts:
        ends = [commit.segments[node][-1].key for commit in chain.commits if commit.segments.get(node)]
        for detail, segment in _check_archive(chain.segments(node), frozenset(ends)):
            findings.conflict(Conflict("archive", detail, node=node, object=segment.key))


def _check_cut(commit: Commit) -> Iterator[str]:
    """Yield the contradictions between the ids of a commit's cut, operation and chain."""
    expected = f"{commit.operation}.{commit.cut.attempts}"
    # A snapshot that was resumed has the number of the resumption in the ids of its cuts.
    made = commit.cut.id if commit.increment else RESUMED_RUN.sub(".", commit.cut.id)
    if made != expected:
        yield f"its cut is {commit.cut.id}, but attempt {commit.cut.attempts} of its operation made cut {expected}"
    if commit.increment == 0 and commit.chain != commit.operation:
        yield f"its chain is {commit.chain}, but the operation of a full snapshot is its chain: {commit.operation}"
    primaries = commit.cut.by_node.keys()
    if commit.databases and commit.databases.keys() != primaries:
        described = list_some(sorted(commit.databases), NAMED_MAX)
        yield f"it describes the databases of {described} instead of {list_some(sorted(primaries), NAMED_MAX)}"


def _check_objects(chain: Chain, commit: Commit, repaired: Set[str]) -> Iterator[str]:
    if commit is chain.full and chain.beginning:
        return
    for stored in commit.own_objects:
        if stored.key not in repaired and not stored.key.startswith(_folders(commit, stored)):
            yield f"object {stored.key} does not belong to operation {commit.operation}, which lists it"


def _note_operations(before: Commit | None, commit: Commit, repaired: Set[str]) -> Iterator[Doubt]:
    """Yield a doubt for each segment of an operation that did not begin between the previous commit and this commit.

    The first segments of an increment may be those of operations that failed, or that archived WAL ahead. These get
    their time from the clock of their machine, which may be wrong.
    """
    last = time_of_id(commit.operation)
    first_of_all = time_of_id(before.operation) if before else last
    for node, segments in commit.segments.items():
        # Of a copy that was made in the background of earlier increments, these have written the archive.
        began_by = operations_of(commit, node)[1:]
        first = time_of_id(began_by[0]) if began_by else first_of_all
        for segment in segments:
            is_own = segment.operation == commit.operation or segment.key in repaired
            if is_own or first is None or last is None:
                continue
            at = time_of_id(segment.operation)
            limits = first.timestamp() - SLACK_SECONDS, last.timestamp() + SLACK_SECONDS
            has_ended = before is not None and segment.operation == before.operation and not began_by
            if before is None or at is None or has_ended or not limits[0] <= at.timestamp() <= limits[1]:
                reason = "did not make the full snapshot"
                if before is not None:
                    reason = "did not begin between the previous commit and this one"
                if has_ended:
                    reason = "made the previous commit, which lists all segments that it wrote"
                detail = f"operation {segment.operation} wrote it, which {reason}"
                yield Doubt("operation", detail, node=node, object=segment.key)


def _folders(commit: Commit, stored: StoredObject) -> tuple[str, ...]:
    """Return the beginnings of the keys that the object may have."""
    if stored.kind not in (BASE, LARGE_OBJECTS):
        return (f"{ddl_prefix(commit.snapshot, stored.node, commit.operation)}/",)
    operations = operations_of(commit, stored.node)
    return tuple(f"{base_prefix(commit.snapshot, stored.node, operation)}/" for operation in operations)


def _large_objects_of(commit: Commit) -> dict[str, int]:
    """Return how many large objects of the full snapshot the commit warns of, by shard."""
    return {out.node: out.count for out in commit.left_out if out.kind == LeftOutKind.LARGE_OBJECTS_OF_FULL}


def _check_left_out(chain: Chain, commit: Commit, *, repeats_large: bool) -> Iterator[str]:
    """Yield the contradictions between a commit's list of left-out parts and the parts themselves."""
    full, primaries = chain.full, commit.cut.by_node.keys()
    if strange := sorted({out.node for out in commit.left_out} - primaries):
        yield f"it leaves out parts of {list_some(strange, NAMED_MAX)}, which is no primary"
    of_full = _large_objects_of(commit)
    counts = {node: count for node, count in count_by_node(full).items() if node in primaries}
    if of_full != counts and not repeats_large:
        nodes = {node for node in of_full.keys() | counts.keys() if of_full.get(node) != counts.get(node)}
        keys = sorted(one.key for one in list_large_objects(full) if one.node in nodes)
        yield (
            f"it warns of large objects of the full snapshot ({_counts(of_full)}), which stored {_counts(counts)}"
            + (f" in {list_some(keys, NAMED_MAX)}" if keys else "")
        )
    kind = LeftOutKind.STANDBY_COPY
    copies = [
        {(out.node, out.name) for out in one.left_out if out.kind == kind and out.node in primaries}
        for one in (full, commit)
    ]
    if copies[0] != copies[1]:
        yield "it names other standbys without a copy than the full snapshot"
    if copied := sorted(name for _, name in copies[1] if name in commit.segments):
        yield f"it says that there is no copy of {list_some(copied, NAMED_MAX)}, but the full snapshot has one"
    kind = LeftOutKind.ABSENT_COPY
    absent = {out.name for out in commit.left_out if out.kind == kind and out.name in commit.segments}
    if absent != commit.absent.keys():
        names = list_some(sorted(absent ^ commit.absent.keys()), NAMED_MAX)
        yield f"it names other standbys that it leaves out than it lists: {names}"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} on {node}" for node, count in sorted(counts.items())) or "none"


def _check_rules(chain: Chain) -> Iterator[tuple[str, str]]:
    """Yield, by shard, the tables that the rules of the full snapshot exclude. Increments may only exclude more."""
    stored, rules = chain.stored_full, chain.full.rules
    for shard in chain.primaries:
        names = {group.name for group in chain.definitions(shard).values()}
        if excluded := sorted(name for name in names if not is_included(name, rules)):
            tables = list_some(excluded, NAMED_MAX)
            yield shard, f"the rules of the full snapshot exclude {tables}, but the chain has their rows"
        # Tables and shards that came later may be append-only by later rules. A merged chain begins with them.
        first = Chain(stored).groups(shard) if shard in stored.groups else ()
        if others := sorted(
            group.name
            for group in first
            if group.identity == "append_only" and not is_matching(group.name, rules.append_only)
        ):
            tables = list_some(others, NAMED_MAX)
            yield shard, f"{tables} are append-only tables, but the rules of the full snapshot do not say so"
        listed = {group.name for group in chain.groups(shard)}
        kinds = (LeftOutKind.EXCLUDED_TABLE, LeftOutKind.UNLOGGED_TABLE, LeftOutKind.FOREIGN_TABLE)
        out = {left.name for left in chain.left_out if left.node == shard and left.kind in kinds}
        if both := sorted(listed & out):
            yield shard, f"the newest commit says that it leaves out {list_some(both, NAMED_MAX)}, but lists their rows"


def _check_archive(segments: tuple[Segment, ...], ends: frozenset[str]) -> Iterator[tuple[str, Segment]]:
    """Yield contradictions about transactions that span segments; `ends` are the keys of the commits' last segments."""
    for segment in segments:
        if segment.open is None:
            continue
        if segment.open.lsn < segment.through:
            yield f"a transaction at {segment.open.lsn} is open at its end, which is {segment.through}", segment
        if segment.key in ends:
            yield f"the archive of a commit ends inside the transaction at {segment.open.lsn}", segment
    for segment, following in pairwise(segments):
        was, now = segment.open, following.open
        if was is not None and now is not None and was.lsn == now.lsn and now.seq < was.seq:
            yield f"it continues the transaction at {was.lsn}, but only up to change {now.seq} of it", following
        if was is not None and now is not None and was.lsn == now.lsn and now.changes < was.changes:
            yield f"it continues the transaction at {was.lsn}, but has only {now.changes} changes of it", following
