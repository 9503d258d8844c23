"""Compare the copies of a chain at an exact time: the state that `restore --at TIME --exact` restores.

Before this, the chain was checked up to the later cut: all objects and changes were compared. (If the chain begins
with a merge at that cut, earlier objects were not read.) Here, each copy's rows are folded at the positions of the
exact time and compared by partition. At these positions, no global transaction is torn (wal/cut/exact_time.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from cutline.check.compare import compare_copies
from cutline.check.copies import Copies
from cutline.check.hashing import combine_all
from cutline.check.named_rows import ROWS_DIFFER
from cutline.check.new_part import NewPart
from cutline.check.partitions import hash_partitions
from cutline.check.report import Conflict, Findings, Skipped, SnapshotReport
from cutline.check.streams import StreamHashes
from cutline.check.uncompared import skip_uncompared
from cutline.fleet.progress import Progress
from cutline.fleet.record import Time
from cutline.storage.location import StoreLocation

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.snapshots.listing.exact_point import ExactPoint

NOT_NAMED = "--rows names the rows that differ at a cut, not at a time between two cuts"


def compare_exact(
    session: SparkSession, point: ExactPoint, location: StoreLocation, findings: Findings, progress: Progress
) -> None:
    """Compare the rows of all copies at the exact time; add partitions, conflicts and skipped copies to the report."""
    report, chain = SnapshotReport(findings.report.name, findings.report.increment), point.chain
    at_time = Findings(report, set(findings.damaged))
    copies = Copies.of(chain)
    late = [node for node in copies.nodes if chain.complete_at[node] > chain.position(node)]
    shards = {node: shard for node, shard in copies.shard.items() if node not in late}
    copies = replace(copies, nodes=tuple(shards), shard=shards)
    streams = StreamHashes(combine_all([], 2), {}, location)
    hashes = hash_partitions(session, copies, location, at_time, progress, streams, NewPart(chain))
    compare_copies(copies, hashes, at_time)
    skip_uncompared(copies, at_time)
    when = f"at {Time.exactly(point.moment)}"
    skipped = [*report.skipped, *(Skipped(f"the copy of {node} {when}", "it began again later") for node in late)]
    found = findings.report
    found.exact_at = Time.exactly(point.moment)
    found.compared.partitions += report.compared.partitions
    named = {conflict.object for conflict in found.conflicts if conflict.object}
    found.conflicts += [_at_time(conflict, when) for conflict in report.conflicts if conflict.object not in named]
    for part in skipped:
        findings.skip(part)


def _at_time(conflict: Conflict, when: str) -> Conflict:
    why = NOT_NAMED if conflict.kind in ROWS_DIFFER else conflict.rows_unnamed
    return replace(conflict, detail=f"{when}: {conflict.detail}", rows_unnamed=why)
