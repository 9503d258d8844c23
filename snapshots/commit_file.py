"""The text of a commit file: a commit as JSON, and back (docs/storage.md)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from fleet.baseline import identity_from_json
from fleet.config import GroupRules
from fleet.groups import Group, group_from_json
from fleet.left_out import left_out_from_json
from fleet.lsn import lsn_from_text, lsn_to_text
from fleet.table_state import TableState, table_state_from_json
from snapshots.documents import check_schema, entries, understood
from snapshots.manifest import Commit, CutRecord, FullPart, Previous, SchemaPart, Sequence, StoredObject
from snapshots.well_formed import check_commit
from wal.archive import segment_from_json
from wal.cut_values import Cut, NodeCut, Undecided

FULL_SCHEMA = "cutline/snapshot/2"
INCREMENT_SCHEMA = "cutline/increment/2"
T = TypeVar("T")


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
        "cut": cut_to_json(commit.cut),
        "sequences": {shard: [asdict(entry) for entry in found] for shard, found in commit.sequences.items()},
        "segments": {node: [one.to_json() for one in found] for node, found in commit.segments.items()},
    }
    if commit.previous is not None:
        document["previous"] = asdict(commit.previous)
    if commit.left_out is not None:
        document["left_out"] = [one.to_json() for one in commit.left_out]
    if commit.terminal:
        document["terminal"] = True
    if commit.schema:
        document["schema_changes"] = _schema_to_json(commit.schema)
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
            "tables": {shard: [state.to_json() for state in found.values()] for shard, found in part.tables.items()},
            "fingerprints": dict(part.fingerprints),
        }
    return document


def _schema_to_json(part: SchemaPart) -> dict[str, Any]:
    return {
        "groups": {shard: [group.to_json() for group in found] for shard, found in part.groups.items()},
        "gone": {shard: list(found) for shard, found in part.gone.items()},
        "successions": {shard: _by_text(found) for shard, found in part.successions.items()},
        "begun": {
            node: {str(number): lsn_to_text(at) for number, at in found.items()} for node, found in part.begun.items()
        },
        "tables": {shard: [state.to_json() for state in found.values()] for shard, found in part.tables.items()},
        "objects": [stored.to_json() for stored in part.objects],
        "roles": {shard: list(found) for shard, found in part.roles.items()},
        "fingerprints": dict(part.fingerprints),
    }


def _by_text(found: Mapping[int, int]) -> dict[str, int]:
    return {str(number): value for number, value in found.items()}


def commit_from_json(key: str, document: dict[str, Any]) -> Commit:
    """Read what `commit_to_json` wrote; raise ManifestError naming the object."""
    with understood(key, "commit file"):
        schema = check_schema(document, FULL_SCHEMA, INCREMENT_SCHEMA)
        commit = Commit(
            snapshot=document["snapshot"],
            increment=document["increment"],
            operation=document["operation"],
            chain=document["chain"],
            created_at=document["created_at"],
            seconds=document["seconds"],
            comment=document["comment"],
            counts=document["counts"],
            cut=_cut_from_json(document["cut"]),
            sequences={
                shard: tuple(Sequence(**entry) for entry in entries(found))
                for shard, found in document["sequences"].items()
            },
            segments={
                node: tuple(segment_from_json(entry) for entry in entries(found))
                for node, found in document["segments"].items()
            },
            full=_full_from_json(document) if schema == FULL_SCHEMA else None,
            schema=_schema_from_json(document["schema_changes"]) if "schema_changes" in document else None,
            previous=Previous(**document["previous"]) if "previous" in document else None,
            left_out=tuple(map(left_out_from_json, entries(document["left_out"]))) if "left_out" in document else None,
            digest=document.get("digest", ""),
            terminal=document.get("terminal", False),
        )
        check_commit(commit)
        return commit


def _full_from_json(document: dict[str, Any]) -> FullPart:
    return FullPart(
        fleet_id=document["fleet"],
        global_id_form=document["global_id"],
        baseline=_by_name("node", map(identity_from_json, entries(document["baseline"]))),
        groups=_groups_from_json(document["groups"]),
        base={node: lsn_from_text(text) for node, text in document["base"].items()},
        objects=_objects_from_json(document["objects"]),
        roles={node: tuple(entries(found)) for node, found in document["roles"].items()},
        rules=GroupRules(**{name: tuple(entries(patterns)) for name, patterns in document["rules"].items()}),
        tables=_tables_from_json(document["tables"]),
        fingerprints=document["fingerprints"],
    )


def _schema_from_json(document: dict[str, Any]) -> SchemaPart:
    return SchemaPart(
        groups=_groups_from_json(document["groups"]),
        gone={shard: tuple(entries(found)) for shard, found in document["gone"].items()},
        successions={
            shard: {int(new): old for new, old in found.items()} for shard, found in document["successions"].items()
        },
        begun={
            node: {int(number): lsn_from_text(at) for number, at in found.items()}
            for node, found in document["begun"].items()
        },
        tables=_tables_from_json(document["tables"]),
        objects=_objects_from_json(document["objects"]),
        roles={shard: tuple(entries(found)) for shard, found in document["roles"].items()},
        fingerprints=document["fingerprints"],
    )


def _groups_from_json(document: dict[str, Any]) -> dict[str, tuple[Group, ...]]:
    return {shard: tuple(map(group_from_json, entries(found))) for shard, found in document.items()}


def _objects_from_json(document: Any) -> tuple[StoredObject, ...]:
    return tuple(
        StoredObject(**(entry | {"rows": {int(group): count for group, count in entry["rows"].items()}}))
        for entry in entries(document)
    )


def _tables_from_json(document: dict[str, Any]) -> dict[str, dict[str, TableState]]:
    return {shard: _by_name("table", map(table_state_from_json, entries(found))) for shard, found in document.items()}


def _by_name(name: str, found: Iterable[T]) -> dict[str, T]:
    """What was found, by the field `name`; raise ValueError where two have the same."""
    listed = list(found)
    named: dict[str, T] = {getattr(one, name): one for one in listed}
    if len(named) != len(listed):
        raise ValueError(f"two entries of one {name}")
    return named


def cut_to_json(record: CutRecord) -> dict[str, Any]:
    """A cut as commits and `show` have it."""
    return {
        "id": record.id,
        "attempts": record.attempts,
        "causes": list(record.causes),
        "seconds": round(record.seconds, 6),
        "nodes": [_node_cut_json(node, cut) for node, cut in record.cut.nodes.items()],
        "global_transactions": record.cut.global_transactions,
        "included_early": record.cut.included_early,
        "in_flight": record.cut.in_flight,
    }


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
    listed = entries(entry["nodes"])
    nodes = {
        found["node"]: NodeCut(
            start=lsn_from_text(found["start"]),
            finish=lsn_from_text(found["finish"]),
            position=lsn_from_text(found["position"]),
            undecided=tuple(
                Undecided(e["global_id"], lsn_from_text(e["lsn"]), lsn_from_text(e["end_lsn"]))
                for e in entries(found["undecided"])
            ),
            rolled_back=tuple(lsn_from_text(text) for text in entries(found["rolled_back"])),
            local_transactions=found["local_transactions"],
        )
        for found in listed
    }
    if len(nodes) != len(listed):
        raise ValueError("two cuts of one node")
    cut = Cut(nodes, entry["global_transactions"], entry["included_early"], entry["in_flight"])
    causes = tuple(entries(entry.get("causes", [])))
    return CutRecord(entry["id"], entry["attempts"], entry["seconds"], cut, causes)
