"""Whether what a commit says can be so: every value of its type, every part of it in its place.

A digest shows that a commit is as it was written. This shows that it is one that can be worked with, so that
nothing is begun with one that can't.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from snapshots.chain import Chain
from snapshots.documents import understood
from snapshots.manifest import LARGE_OBJECTS, LARGE_OBJECTS_COUNT, Commit, FullPart, SchemaPart
from snapshots.value_types import check_time, check_types
from storage.store import check_key

COUNTS_SHOWN = ("bytes", "changes", "transactions")


def check_commit(commit: Commit) -> None:
    """Raise TypeError or ValueError unless the commit can be one: its values, and its parts by node and shard."""
    check_types(commit, Commit, "")
    check_time(commit.created_at)
    if (commit.full is not None) != (commit.increment == 0) or commit.increment < 0:
        raise ValueError(f"increment {commit.increment}")
    for name in COUNTS_SHOWN:
        if commit.counts.get(name, -1) < 0:
            raise ValueError(f"counts.{name}")
    for key, size in commit.object_sizes.items():
        if size < 0 or check_key(key) != key:
            raise ValueError(f"size of {key}")
    for node, found in commit.segments.items():
        if any(one.range.node != node for one in found):
            raise ValueError(f"segments.{node} has another node's")
    if commit.full:
        _check_full(commit, commit.full)


def check_fits(chain: Chain, increment: Commit, key: str) -> None:
    """Raise ManifestError unless the increment is of the chain's nodes, and goes on from its definitions."""
    with understood(key, f"increment of the full snapshot {chain.name}"):
        _check_nodes(chain.part, increment)
        if increment.schema:
            _check_definitions(chain, increment.schema)


def _check_nodes(full: FullPart, commit: Commit) -> None:
    primaries = {node for node, identity in full.baseline.items() if identity.backup_of is None}
    for what, found in (("cut", commit.cut.cut.nodes), ("sequences", commit.sequences)):
        if found.keys() != primaries:
            raise ValueError(f"{what} of {_names(found)}, the primaries are {_names(primaries)}")
    if commit.segments.keys() != full.baseline.keys():
        raise ValueError(f"segments of {_names(commit.segments)}, the nodes are {_names(full.baseline)}")
    if commit.schema:
        _check_schema(full, primaries, commit.schema)


def _check_schema(full: FullPart, primaries: set[str], part: SchemaPart) -> None:
    by_shard = (part.groups, part.gone, part.successions, part.tables, part.roles, part.fingerprints)
    if not set().union(*by_shard) <= primaries or not part.begun.keys() <= full.baseline.keys():
        raise ValueError("schema_changes of a node that the snapshot has not")
    for stored in part.objects:
        if stored.node not in full.baseline:
            raise ValueError(f"object of {stored.node}")
        begun = {group.number for group in part.groups.get(full.baseline[stored.node].backup_of or stored.node, ())}
        if not stored.rows.keys() <= begun:
            raise ValueError(f"object {stored.key} has rows of a group that did not begin")


def _check_definitions(before: Chain, part: SchemaPart) -> None:
    """That every number means something: state and rows are put together by them."""
    for shard in before.part.groups:
        if not any(shard in one for one in (part.groups, part.gone, part.successions)) and not part.begun:
            continue
        known = before.definitions(shard).keys()
        begun = {group.number for group in part.groups.get(shard, ())}
        successions = part.successions.get(shard, {})
        if len(begun) != len(part.groups.get(shard, ())) or begun & known:
            raise ValueError(f"schema_changes.groups.{shard} has a number that is another's")
        if not successions.keys() <= begun or not set(successions.values()) <= known:
            raise ValueError(f"schema_changes.successions.{shard} has a number that is none of its definitions'")
        if not set(part.gone.get(shard, ())) <= known:
            raise ValueError(f"schema_changes.gone.{shard} has a number that is none of its definitions'")
        for node in before.part.baseline:
            if before.shard_of(node) == shard and part.begun.get(node, {}).keys() != begun:
                raise ValueError(f"schema_changes.begun.{node} is not of the definitions that began")


def _check_full(commit: Commit, part: FullPart) -> None:
    _check_nodes(part, commit)
    primaries = {node for node, identity in part.baseline.items() if identity.backup_of is None}
    if not {identity.backup_of for identity in part.baseline.values()} <= {None, *primaries} or not primaries:
        raise ValueError(f"baseline of {_names(part.baseline)}")
    for what, found, nodes in (
        ("base", part.base, part.baseline), ("groups", part.groups, primaries), ("roles", part.roles, primaries),
    ):  # fmt: skip
        if set(found) != set(nodes):
            raise ValueError(f"{what} of {_names(found)} instead of {_names(nodes)}")
    if not part.tables.keys() | part.fingerprints.keys() <= primaries:
        raise ValueError("tables or fingerprints of what is no primary")
    if commit.schema:
        _check_definitions(Chain(replace(commit, schema=None)), commit.schema)
    numbers = {shard: [group.number for group in found] for shard, found in part.groups.items()}
    for shard, here in numbers.items():
        if len(set(here)) != len(here):
            raise ValueError(f"groups.{shard} has two of one number")
    for stored in part.objects:
        if stored.node not in part.baseline:
            raise ValueError(f"object of {stored.node}")
        known = set(numbers[part.baseline[stored.node].backup_of or stored.node])
        if not stored.rows.keys() <= ({LARGE_OBJECTS_COUNT} if stored.kind == LARGE_OBJECTS else known):
            raise ValueError(f"object {stored.key} has rows of a group that is none")


def _names(found: Any) -> str:
    return ", ".join(sorted(found)) or "none"
