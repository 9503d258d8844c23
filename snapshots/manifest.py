"""Commit files: what a full snapshot or an increment says of itself, and a chain of them read as one.

A commit lists every object of its snapshot or increment with size and digest. It is written once, as the last
step; nothing in the store exists for Cutline unless a commit lists it (docs/architecture.md, invariant 1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from fleet.baseline import NodeIdentity, identity_from_json
from fleet.config import GroupRules
from fleet.groups import Group, group_from_json
from fleet.lsn import lsn_from_text, lsn_to_text
from storage.errors import SnapshotError
from wal.archive import Segment, check_contiguous, segment_from_json
from wal.cut_values import Cut, NodeCut, Undecided

FULL_SCHEMA = "cutline/snapshot/1"
INCREMENT_SCHEMA = "cutline/increment/1"


class ManifestError(SnapshotError):
    """A commit file can't be understood."""

    exit_code = 3


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object of a base copy or of a node's schema; `rows` counts rows by group number."""

    key: str
    kind: str
    node: str
    size: int
    digest: str
    rows: Mapping[int, int] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The object's entry in a commit."""
        return asdict(self) | {"rows": {str(group): count for group, count in self.rows.items()}}


@dataclass(frozen=True, slots=True)
class Sequence:
    """A sequence's value, read after the cut: at or beyond what the state at the cut has used."""

    schema: str
    name: str
    last_value: int | None


@dataclass(frozen=True, slots=True)
class CutRecord:
    """A resolved cut, and how it came about. `seconds` from the first start marker to the last finish marker."""

    id: str
    attempts: int
    seconds: float
    cut: Cut

    def to_json(self) -> dict[str, Any]:
        """The cut as a commit has it."""
        return {
            "id": self.id,
            "attempts": self.attempts,
            "seconds": round(self.seconds, 6),
            "nodes": [_node_cut_json(node, cut) for node, cut in self.cut.nodes.items()],
            "global_transactions": self.cut.global_transactions,
            "included_early": self.cut.included_early,
            "in_flight": self.cut.in_flight,
        }


@dataclass(frozen=True, slots=True)
class Commit:
    """A full snapshot (increment 0) or an increment. `segments` are those after the commit before."""

    snapshot: str
    increment: int
    operation: str
    chain: str
    created_at: str
    seconds: float
    cut: CutRecord
    segments: Mapping[str, tuple[Segment, ...]]
    sequences: Mapping[str, tuple[Sequence, ...]]
    counts: Mapping[str, int]
    comment: str = ""
    full: FullPart | None = None

    @property
    def object_sizes(self) -> dict[str, int]:
        """Every object that this commit adds, by key, with its size in bytes."""
        sizes = {segment.key: segment.size for found in self.segments.values() for segment in found}
        if self.full:
            sizes |= {stored.key: stored.size for stored in self.full.objects}
        return sizes


@dataclass(frozen=True, slots=True)
class FullPart:
    """What only a full snapshot's commit says. Groups by shard; positions and roles by node.

    `rules` chose the groups.
    """

    fleet_id: str
    global_id_form: str
    baseline: Mapping[str, NodeIdentity]
    groups: Mapping[str, tuple[Group, ...]]
    base: Mapping[str, int]
    objects: tuple[StoredObject, ...]
    roles: Mapping[str, tuple[str, ...]]
    rules: GroupRules


@dataclass(frozen=True, slots=True)
class Chain:
    """A snapshot with its increments up to some number: what a state is folded from."""

    full: Commit
    increments: tuple[Commit, ...] = ()

    @property
    def name(self) -> str:
        """The snapshot's name."""
        return self.full.snapshot

    @property
    def part(self) -> FullPart:
        """What the full snapshot's commit says."""
        if self.full.full is None:
            raise RuntimeError("the first commit of a chain is a full one")
        return self.full.full

    @property
    def commits(self) -> tuple[Commit, ...]:
        """The full snapshot's commit and the increments' in order."""
        return (self.full, *self.increments)

    @property
    def last(self) -> Commit:
        """The newest commit."""
        return self.commits[-1]

    @property
    def nodes(self) -> tuple[NodeIdentity, ...]:
        """The nodes that the chain has copies of."""
        return tuple(self.part.baseline.values())

    def shard_of(self, node: str) -> str:
        """The primary whose rows `node` holds."""
        return self.part.baseline[node].backup_of or node

    def up_to(self, increment: int) -> Chain:
        """The chain as it was at `increment`."""
        return replace(self, increments=self.increments[:increment])

    def segments(self, node: str) -> tuple[Segment, ...]:
        """The node's archive as the commits list it."""
        return tuple(segment for commit in self.commits for segment in commit.segments.get(node, ()))

    def position(self, node: str) -> int:
        """Where the node's part of the state ends: its primary's position at the last cut."""
        return self.last.cut.cut.nodes[self.shard_of(node)].position

    def excluded(self, node: str) -> frozenset[int]:
        """Positions of the transactions before `position` that are not part of the state."""
        shard = self.shard_of(node)
        left_out = {entry.lsn for entry in self.last.cut.cut.nodes[shard].undecided}
        undone = {lsn for commit in self.commits for lsn in commit.cut.cut.nodes[shard].rolled_back}
        return frozenset(left_out | undone)

    def groups(self, node: str) -> tuple[Group, ...]:
        """The groups that the node holds."""
        return self.part.groups[self.shard_of(node)]

    def check_archive(self) -> None:
        """Raise ArchiveError unless every node's segments are without a hole from its base on."""
        for node in self.part.baseline:
            check_contiguous(node, self.part.base[node], self.segments(node))


def commit_to_json(commit: Commit) -> dict[str, Any]:
    """The commit file's document."""
    document: dict[str, Any] = {
        "schema": FULL_SCHEMA if commit.full else INCREMENT_SCHEMA,
        "snapshot": commit.snapshot,
        "increment": commit.increment,
        "operation": commit.operation,
        "chain": commit.chain,
        "created_at": commit.created_at,
        "seconds": round(commit.seconds, 3),
        "comment": commit.comment,
        "counts": dict(commit.counts),
        "cut": commit.cut.to_json(),
        "sequences": {shard: [asdict(entry) for entry in found] for shard, found in commit.sequences.items()},
        "segments": {node: [one.to_json() for one in found] for node, found in commit.segments.items()},
    }
    if commit.full:
        part = commit.full
        document |= {
            "fleet": part.fleet_id,
            "global_id": part.global_id_form,
            "baseline": [identity.to_json() for identity in part.baseline.values()],
            "groups": {shard: [group.to_json() for group in found] for shard, found in part.groups.items()},
            "base": {node: lsn_to_text(position) for node, position in part.base.items()},
            "objects": [stored.to_json() for stored in part.objects],
            "roles": {node: list(found) for node, found in part.roles.items()},
            "rules": asdict(part.rules),
        }
    return document


def commit_from_json(key: str, document: dict[str, Any]) -> Commit:
    """Read what `commit_to_json` wrote; raise ManifestError naming the object."""
    try:
        if document["schema"] not in (FULL_SCHEMA, INCREMENT_SCHEMA):
            raise ValueError(f"schema {document['schema']!r}")
        return Commit(
            snapshot=document["snapshot"],
            increment=int(document["increment"]),
            operation=document["operation"],
            chain=document["chain"],
            created_at=document["created_at"],
            seconds=float(document["seconds"]),
            comment=document["comment"],
            counts={str(name): int(count) for name, count in document["counts"].items()},
            cut=_cut_from_json(document["cut"]),
            sequences={
                shard: tuple(Sequence(**entry) for entry in found) for shard, found in document["sequences"].items()
            },
            segments={
                node: tuple(segment_from_json(entry) for entry in found) for node, found in document["segments"].items()
            },
            full=_full_from_json(document) if document["schema"] == FULL_SCHEMA else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ManifestError(
            f"object {key} is no commit file that this version understands ({error})",
            hint="a newer version of Cutline may have written it; else restore the object from a copy",
            details={"object": key},
        ) from error


def _full_from_json(document: dict[str, Any]) -> FullPart:
    return FullPart(
        fleet_id=document["fleet"],
        global_id_form=document["global_id"],
        baseline={entry["node"]: identity_from_json(entry) for entry in document["baseline"]},
        groups={shard: tuple(group_from_json(entry) for entry in found) for shard, found in document["groups"].items()},
        base={node: lsn_from_text(text) for node, text in document["base"].items()},
        objects=tuple(
            StoredObject(**(entry | {"rows": {int(group): count for group, count in entry["rows"].items()}}))
            for entry in document["objects"]
        ),
        roles={node: tuple(found) for node, found in document["roles"].items()},
        rules=GroupRules(**{name: tuple(patterns) for name, patterns in document["rules"].items()}),
    )


def _node_cut_json(node: str, cut: NodeCut) -> dict[str, Any]:
    return {
        "node": node,
        "start": lsn_to_text(cut.start),
        "finish": lsn_to_text(cut.finish),
        "position": lsn_to_text(cut.position),
        "local_transactions": cut.local_transactions,
        "undecided": [
            {"global_id": e.global_id, "lsn": lsn_to_text(e.lsn), "end_lsn": lsn_to_text(e.end_lsn)}
            for e in cut.undecided
        ],
        "rolled_back": [lsn_to_text(lsn) for lsn in cut.rolled_back],
    }


def _cut_from_json(entry: dict[str, Any]) -> CutRecord:
    nodes = {
        found["node"]: NodeCut(
            start=lsn_from_text(found["start"]),
            finish=lsn_from_text(found["finish"]),
            position=lsn_from_text(found["position"]),
            undecided=tuple(
                Undecided(e["global_id"], lsn_from_text(e["lsn"]), lsn_from_text(e["end_lsn"]))
                for e in found["undecided"]
            ),
            rolled_back=tuple(lsn_from_text(text) for text in found["rolled_back"]),
            local_transactions=int(found["local_transactions"]),
        )
        for found in entry["nodes"]
    }
    cut = Cut(nodes, int(entry["global_transactions"]), int(entry["included_early"]), int(entry["in_flight"]))
    return CutRecord(entry["id"], int(entry["attempts"]), float(entry["seconds"]), cut)
