"""The JSON output of `create`."""

from __future__ import annotations

from typing import Any

from cutline.cli.output.renewed import copying_document, renamed_nodes, renewed_document, retired_shards
from cutline.cli.output.tables import time_text
from cutline.fleet.record import to_builtins
from cutline.snapshots.records.commit import Commit, FullSnapshot
from cutline.snapshots.records.proven_chains import cut_time, safe_time

SCHEMA = "cutline/create/1"


def document_of(commit: Commit) -> dict[str, Any]:
    """Return the command's JSON output."""
    cut = commit.cut
    return {
        "schema": SCHEMA,
        "snapshot": commit.snapshot,
        "increment": commit.increment,
        "operation": commit.operation,
        "created_at": commit.created_at,
        "cut_at": time_text(cut_time(commit)),
        "safe_at": safe_time(commit),
        "terminal": commit.terminal,
        "seconds": round(commit.seconds, 3),
        "ran_seconds": commit.ran_seconds if isinstance(commit, FullSnapshot) else None,
        **{name: commit.counts[name] for name in ("bytes", "objects", "rows", "changes", "transactions")},
        "cut": {
            "id": cut.id,
            "attempts": cut.attempts,
            "causes": list(cut.causes),
            "seconds": round(cut.seconds, 6),
            "nodes": [
                {
                    "node": node.node,
                    "start": str(node.start),
                    "finish": str(node.finish),
                    "position": str(node.position),
                }
                for node in cut.nodes
            ],
            "global_transactions": cut.global_transactions,
            "included_early": cut.included_early,
            "in_flight": cut.in_flight,
        },
        "left_out": to_builtins(commit.left_out),
        "renewed": renewed_document(commit),
        "copying": copying_document(commit),
        "retired": retired_shards(commit),
        "renamed": renamed_nodes(commit),
    }
