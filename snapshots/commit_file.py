"""The text of a commit file: a commit as JSON, and back (docs/storage-format.md)."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fleet.baseline import identity_from_json
from fleet.config import GroupRules
from fleet.groups import group_from_json
from fleet.left_out import left_out_from_json
from fleet.lsn import lsn_from_text, lsn_to_text
from fleet.table_state import table_state_from_json
from snapshots.manifest import Commit, CutRecord, FullPart, ManifestError, Sequence, StoredObject
from wal.archive import segment_from_json
from wal.cut_values import Cut, NodeCut, Undecided

FULL_SCHEMA = "cutline/snapshot/1"
INCREMENT_SCHEMA = "cutline/increment/1"


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
    if commit.left_out is not None:
        document["left_out"] = [one.to_json() for one in commit.left_out]
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
            left_out=tuple(map(left_out_from_json, document["left_out"])) if "left_out" in document else None,
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
        # Commits of before this field say nothing of it, and their chains go on with the checks of then.
        tables={
            shard: {entry["table"]: table_state_from_json(entry) for entry in found}
            for shard, found in document.get("tables", {}).items()
        },
    )


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
    return CutRecord(entry["id"], int(entry["attempts"]), float(entry["seconds"]), cut, tuple(entry.get("causes", ())))
