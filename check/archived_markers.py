"""Check that a chain's archives have the markers of its cuts: they hold the WAL that the cuts were made of."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from cutline.check.findings import Findings
from cutline.check.report import Conflict
from cutline.fleet.lsn import Lsn
from cutline.snapshots.records.chain import Chain
from cutline.wal.cut.markers import marker_from_bytes


def check_markers(chain: Chain, markers: Mapping[str, Mapping[bytes, Lsn]], findings: Findings) -> None:
    """Check that every undamaged archive has both markers of every cut at the positions that the commit has."""
    for node, contents in markers.items():
        if node in findings.damaged:
            continue
        positions: dict[tuple[str, str], Lsn] = {}
        for content, position in contents.items():
            with suppress(ValueError):
                marker = marker_from_bytes(content)
                positions[marker.cut, marker.kind] = position
        for commit in chain.commits:
            cut = commit.cut.of(chain.shard_of(node))
            for kind, position in (("start", cut.start), ("finish", cut.finish)):
                if positions.get((commit.cut.id, kind)) != position:
                    detail = f"the archive has no {kind} marker of cut {commit.cut.id} at {position}"
                    findings.conflict(Conflict("marker", detail, node=node))
