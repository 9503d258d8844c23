"""The rules for commits that types can't express: its parts fit each other, and it continues the commit before.

The digest proves that a commit is as it was written, its type that every value is valid. These rules prove that its
parts are consistent, so that no command starts work from a commit that is not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import UNSET, UnsetType, structs

from cutline.snapshots.records.chain import Chain, first_summarized
from cutline.snapshots.records.commit import (
    ChainHistory,
    Commit,
    CommitSummary,
    DefinitionChanges,
    FullSnapshot,
    Increment,
)
from cutline.snapshots.records.definition_rules import (
    check_definition_counts,
    check_definitions,
    check_distinct,
    check_groups,
    check_same_kind,
    check_states,
    check_tables,
)
from cutline.snapshots.records.documents import checking
from cutline.snapshots.records.part_rules import (
    check_baseline,
    check_continues,
    check_counts,
    check_cut,
    check_objects,
    check_segments,
)
from cutline.snapshots.records.stored_object import DDL, LARGE_OBJECTS, LARGE_OBJECTS_COUNT, NamedObject
from cutline.storage.store import check_key

COUNTS_SHOWN = ("bytes", "changes", "transactions")


def check_commit(commit: Commit) -> None:
    """Raise ValueError unless the commit's parts fit each other."""
    if isinstance(commit, FullSnapshot) != (commit.increment == 0):
        raise ValueError(f"increment number {commit.increment} does not match the kind of commit")
    for name in COUNTS_SHOWN:
        if name not in commit.counts:
            raise ValueError(f"counts has no {name}")
    for one in commit.named:
        check_key(one.key)
    check_distinct("cut", "node", [one.node for one in commit.cut.nodes])
    check_cut(commit.cut)
    for node, segments in commit.segments.items():
        check_segments(commit, node, segments)
    check_objects(commit)
    if isinstance(commit, FullSnapshot):
        _check_full(commit)
    elif commit.history is not None:
        _check_history(commit, commit.history)


def check_fits(chain: Chain, increment: Increment, key: str) -> None:
    """Raise ManifestError unless the increment has the nodes of the chain and continues its definitions."""
    with checking(key):
        if chain.full.only_cut:
            raise ValueError("it continues a restore point, which has no increments")
        _check_nodes(chain.full, increment)
        check_continues(chain.last, increment)
        check_counts(chain.full, increment)
        # Of a partial chain only the digests are compared (chains.py).
        if not chain.is_partial and increment.history is not None and not _is_of(chain, increment.history):
            raise ValueError("history is not that of the commits before it")
        after = replace(chain, increments=(*chain.increments, increment))
        if increment.definition_changes:
            check_definitions(chain, increment.definition_changes)
            _check_at_commit(chain, after)
        else:
            # Its tables are those of the commit before.
            check_definition_counts(after, increment)


def _is_of(chain: Chain, history: ChainHistory) -> bool:
    """Whether it is the history of the increment that follows the chain, as this version or an earlier one writes it.

    Earlier versions did not summarize the times of cuts.
    """
    expected, found = chain.next_history, {one.increment: one for one in history.recent}
    recent = (_without_lacking(one, found.get(one.increment, one)) for one in expected.recent)
    return history == structs.replace(expected, recent=tuple(recent))


def _without_lacking(expected: CommitSummary, found: CommitSummary) -> CommitSummary:
    lacking = {name: UNSET for name in ("cut_at", "safe_at") if isinstance(getattr(found, name), UnsetType)}
    return structs.replace(expected, **lacking)


def _check_history(commit: Increment, history: ChainHistory) -> None:
    """Raise ValueError unless the history has the numbers before the commit, and for each the same as `previous`."""
    recent = {one.increment: one for one in history.recent}
    if list(recent) != list(range(first_summarized(commit.increment), commit.increment)):
        raise ValueError("history.recent does not have the increments before this one")
    if not all(0 < number < commit.increment for number in history.redefinitions):
        raise ValueError("history.redefinitions has a number that is not of an increment before this one")
    if any(recent[number].digest != one for number, one in history.redefinitions.items() if number in recent):
        raise ValueError("history has two digests for one increment")
    if commit.previous is None:
        raise ValueError("history is set, but previous is not")
    last = recent.get(commit.increment - 1)
    digest, operation = (last.digest, last.operation) if last else (history.full, commit.previous.operation)
    if (commit.previous.digest, commit.previous.operation) != (digest, operation):
        raise ValueError("history and previous name different commits before this one")


def _check_at_commit(before: Chain | None, chain: Chain) -> None:
    """Raise ValueError unless the tables at the chain's last commit fit together."""
    check_tables(before, chain)
    check_definition_counts(chain, chain.last)
    check_same_kind({shard: chain.definitions(shard).values() for shard in chain.full.groups}, named=before is None)


def _check_nodes(full: FullSnapshot, commit: Commit) -> None:
    nodes, primaries = set(full.parts), set(full.primaries)
    _check_same("cut", [one.node for one in commit.cut.nodes], primaries)
    _check_same("sequences", commit.sequences, primaries)
    _check_same("segments", commit.segments, nodes)
    if commit.definition_changes:
        _check_changes(full, commit.definition_changes)


def _check_changes(full: FullSnapshot, changes: DefinitionChanges) -> None:
    primaries = set(full.primaries)
    by_shard = (
        changes.groups, changes.gone, changes.successions, changes.tables, changes.roles, changes.fingerprints,
    )  # fmt: skip
    if not set().union(*by_shard) <= primaries or not changes.begun.keys() <= full.parts.keys():
        raise ValueError("schema_changes names a node that is not in the snapshot")
    for shard, states in changes.tables.items():
        check_states(f"schema_changes.tables.{shard}", states)
    with_ddl = {stored.node for stored in changes.objects if stored.kind == DDL}
    if not with_ddl == changes.roles.keys() == changes.fingerprints.keys():
        raise ValueError("schema_changes has objects of DDL, roles and fingerprints of different shards")
    entries: tuple[NamedObject, ...] = (*changes.objects, *changes.lists)
    for stored in entries:
        if stored.node not in full.parts:
            raise ValueError(f"object {stored.key} is of node {stored.node}, which is not in the snapshot")
        begun = {group.number for group in changes.groups.get(full.parts[stored.node] or stored.node, ())}
        if not stored.rows.keys() <= begun:
            raise ValueError(f"object {stored.key} has rows of a group that is not new in this commit")


def _check_full(full: FullSnapshot) -> None:
    check_baseline(full.baseline)
    nodes, primaries = set(full.parts), set(full.primaries)
    if not primaries or not set(full.parts.values()) <= {None, *primaries}:
        raise ValueError(f"baseline has no primary, or a standby of none of them: {_names(nodes)}")
    if full.only_cut and (full.copied or full.lists or any(full.groups.values()) or full.definition_changes):
        raise ValueError("only_cut is set, but it has tables")
    _check_nodes(full, full)
    _check_same("base", full.base, nodes)
    _check_same("groups", full.groups, primaries)
    _check_same("roles", full.roles, primaries)
    if not full.tables.keys() | full.fingerprints.keys() <= primaries:
        raise ValueError("tables or fingerprints name a node that is not a primary")
    for shard, states in full.tables.items():
        check_states(f"tables.{shard}", states)
    for shard, groups in full.groups.items():
        check_groups(f"groups.{shard}", groups)
    check_counts(full, full)
    first = Chain(structs.replace(full, definition_changes=None))
    check_tables(None, first)
    check_same_kind(full.groups, named=True)
    if full.definition_changes:
        check_definitions(first, full.definition_changes)
    _check_at_commit(first, Chain(full))
    _check_rows(full)


def _check_rows(full: FullSnapshot) -> None:
    numbers = {shard: {group.number for group in groups} for shard, groups in full.groups.items()}
    entries: tuple[NamedObject, ...] = (*full.copied, *full.lists)
    for stored in entries:
        if stored.node not in full.parts:
            raise ValueError(f"object {stored.key} is of node {stored.node}, which is not in the snapshot")
        known = (
            {LARGE_OBJECTS_COUNT} if stored.kind == LARGE_OBJECTS else numbers[full.parts[stored.node] or stored.node]
        )
        if not stored.rows.keys() <= known:
            raise ValueError(f"object {stored.key} has rows of an unknown group")


def _check_same(what: str, found: Iterable[str], expected: set[str]) -> None:
    if set(found) != expected:
        raise ValueError(f"{what} has {_names(found)} instead of {_names(expected)}")


def _names(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none"
