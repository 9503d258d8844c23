"""Check a restore point (`create --only-cut`): it has no rows, so its archive and its cut are all there is to check.

Every object is read and verified, both markers must be in every archive, and the cut must be what the archived events
give. There is little to read, so no Spark is needed.
"""

from __future__ import annotations

from functools import partial

from cutline.check.archived_markers import check_markers
from cutline.check.cuts import check_cuts
from cutline.check.findings import Findings
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.records.chain import Chain
from cutline.storage.errors import report_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.segment_schema import MARKER
from cutline.wal.segments.segments import read_events


def check_restore_point(chain: Chain, store: ObjectStore, findings: Findings, progress: Progress) -> None:
    """Read every object and resolve the cut again; note a conflict for whatever is damaged or differs."""
    segments = [one for node in chain.nodes for one in chain.segments(node.node)]
    progress.step("read WAL archive", total=len(segments), unit="objects")
    markers: dict[str, dict[bytes, Lsn]] = {node.node: {} for node in chain.nodes}
    for one in segments:
        try:
            markers[one.node] |= _read_markers(store, one)
        except ObjectDamagedError as error:
            findings.damage(report_of(error))
        else:
            findings.count(objects=1, size_bytes=one.size)
        progress.advance(1)
    check_markers(chain, markers, findings)
    check_cuts(chain, partial(read_events, store), findings, progress)
    findings.report.compared.transactions += chain.last.cut.global_transactions


def _read_markers(store: ObjectStore, segment: Segment) -> dict[bytes, Lsn]:
    """The segment's markers with their positions; all of its bytes are verified."""
    read_listed(store, segment.node, segment.key, (segment.size, segment.digest))
    events = read_events(store, segment)
    found = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    return dict(zip(found["row"].to_pylist(), map(Lsn, found["lsn"].to_pylist()), strict=True))
