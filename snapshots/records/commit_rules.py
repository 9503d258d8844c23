"""The rules for commits that types can't express: its parts fit each other, and it continues the commit before.

The digest proves that a commit is as it was written, its type that every value is valid. These rules prove that its
parts are consistent, so that no command starts work from a commit that is not.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import structs

from snapshots.records.chain import Chain
from snapshots.records.commit import (
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    Commit,
    DefinitionChanges,
    FullSnapshot,
    Increment,
)
from snapshots.records.documents import checking
from storage.store import check_key

COUNTS_SHOWN = ("bytes", "changes", "transactions")


def check_commit(commit: Commit) -> None:
    """Raise ValueError unless the commit's parts fit each other."""
    if isinstance(commit, FullSnapshot) != (commit.increment == 0):
        raise ValueError(f"increment number {commit.increment} does not match the kind of commit")
    for name in COUNTS_SHOWN:
        if name not in commit.counts:
            raise ValueError(f"counts has no {name}")
    for key in commit.object_sizes:
        check_key(key)
    _check_distinct("cut", [one.node for one in commit.cut.nodes])
    for node, segments in commit.segments.items():
        if any(one.node != node for one in segments):
            raise ValueError(f"segments.{node} lists a segment of another node")
    if isinstance(commit, FullSnapshot):
        _check_full(commit)


def check_fits(chain: Chain, increment: Increment, key: str) -> None:
    """Raise ManifestError unless the increment has the nodes of the chain and continues its definitions."""
    with checking(key):
        _check_nodes(chain.full, increment)
        if increment.definition_changes:
            _check_definitions(chain, increment.definition_changes)


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
        _check_distinct(f"schema_changes.tables.{shard}", [state.table for state in states])
    for stored in changes.objects:
        if stored.node not in full.parts:
            raise ValueError(f"object {stored.key} is of node {stored.node}, which is not in the snapshot")
        begun = {group.number for group in changes.groups.get(full.parts[stored.node] or stored.node, ())}
        if not stored.rows.keys() <= begun:
            raise ValueError(f"object {stored.key} has rows of a group that is not new in this commit")


def _check_definitions(before: Chain, changes: DefinitionChanges) -> None:
    """Raise ValueError unless every number names one definition: states and rows are combined by number."""
    for shard in before.full.groups:
        if not any(shard in one for one in (changes.groups, changes.gone, changes.successions)) and not changes.begun:
            continue
        known = before.definitions(shard).keys()
        begun = {group.number for group in changes.groups.get(shard, ())}
        successions = changes.successions.get(shard, {})
        if len(begun) != len(changes.groups.get(shard, ())) or begun & known:
            raise ValueError(f"schema_changes.groups.{shard} uses a number twice")
        if not successions.keys() <= begun or not set(successions.values()) <= known:
            raise ValueError(f"schema_changes.successions.{shard} has a number without a definition")
        if not set(changes.gone.get(shard, ())) <= known:
            raise ValueError(f"schema_changes.gone.{shard} has a number without a definition")
        for node in before.full.parts:
            if before.shard_of(node) == shard and changes.begun.get(node, {}).keys() != begun:
                raise ValueError(f"schema_changes.begun.{node} does not match the new definitions")


def _check_full(full: FullSnapshot) -> None:
    _check_distinct("baseline", [identity.node for identity in full.baseline])
    nodes, primaries = set(full.parts), set(full.primaries)
    if not primaries or not set(full.parts.values()) <= {None, *primaries}:
        raise ValueError(f"baseline has no primary, or a standby of none of them: {_names(nodes)}")
    _check_nodes(full, full)
    _check_same("base", full.base, nodes)
    _check_same("groups", full.groups, primaries)
    _check_same("roles", full.roles, primaries)
    if not full.tables.keys() | full.fingerprints.keys() <= primaries:
        raise ValueError("tables or fingerprints name a node that is not a primary")
    for shard, states in full.tables.items():
        _check_distinct(f"tables.{shard}", [state.table for state in states])
    if full.definition_changes:
        _check_definitions(Chain(structs.replace(full, definition_changes=None)), full.definition_changes)
    _check_rows(full)


def _check_rows(full: FullSnapshot) -> None:
    numbers = {shard: {group.number for group in groups} for shard, groups in full.groups.items()}
    for shard, groups in full.groups.items():
        if len(numbers[shard]) != len(groups):
            raise ValueError(f"groups.{shard} uses a number twice")
    for stored in full.copied:
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


def _check_distinct(what: str, names: list[str]) -> None:
    if len(set(names)) != len(names):
        raise ValueError(f"{what} has a name twice")


def _names(found: Iterable[str]) -> str:
    return ", ".join(sorted(found)) or "none"
