"""Check a restore point: a cut without rows, whose archives contain only events. This process reads all of them."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa

from cutline.check.cuts import StoredEvents, check_cuts, check_markers
from cutline.check.report import Findings
from cutline.check.segment_transactions import SegmentTransactions
from cutline.check.stored_rows import RowsInvalidError
from cutline.check.transaction_parts import PartReport, PartRules, reduce_parts
from cutline.check.transactions import compare_transactions, reading_here
from cutline.columns.arrow_numbers import to_mask, to_numpy
from cutline.fleet.lsn import Lsn
from cutline.fleet.progress import Progress
from cutline.snapshots.records.chain import Chain
from cutline.storage.errors import report_of
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment
from cutline.wal.segments.damage import ObjectDamagedError, read_listed
from cutline.wal.segments.segments import MARKER, read_events


def check_restore_point(
    chain: Chain, store: ObjectStore, findings: Findings, progress: Progress, known_as: Mapping[str, str]
) -> None:
    """Read every object and resolve the cut again; report a conflict for every damaged object and every difference.

    `known_as` maps further names of shards to their primaries.
    """
    segments = [segment for node in chain.nodes for segment in chain.segments(node.node)]
    progress.step("read WAL archive", total=len(segments), unit="objects")
    markers: dict[str, dict[bytes, Lsn]] = {node.node: {} for node in chain.nodes}
    rules, parts = PartRules.of(chain, known_as), list[PartReport]()
    for segment in segments:
        try:
            events = _read_verified(store, segment)
            _check_transactions(events, segment, chain)
        except ObjectDamagedError as error:
            findings.damage(report_of(error))
        else:
            markers[segment.node] |= _markers(events)
            parts.append(reduce_parts(events, segment.node, rules))
            findings.count(objects=1, size_bytes=segment.size)
        progress.advance(1)
    check_markers(chain, markers, findings)
    stored = StoredEvents(store)
    check_cuts(chain, stored, findings, progress)
    findings.report.compared.transactions += chain.last.cut.global_transactions
    compare_transactions(chain, rules, parts, reading_here(stored), findings)


def _read_verified(store: ObjectStore, segment: Segment) -> pa.Table:
    """Verify every byte of the segment; return its events."""
    read_listed(store, segment.node, segment.key, (segment.size, segment.digest))
    return read_events(store, segment)


def _check_transactions(events: pa.Table, segment: Segment, chain: Chain) -> None:
    transactions = SegmentTransactions(segment, chain.bases[segment.node])
    try:
        transactions.add(events)
        transactions.end()
    except RowsInvalidError as error:
        raise ObjectDamagedError(key=segment.key, kind=error.kind, node=segment.node, detail=str(error)) from error


def _markers(events: pa.Table) -> dict[bytes, Lsn]:
    """Return the markers among the events, with their positions."""
    markers = events.filter(to_mask(to_numpy(events["op"]) == MARKER))
    return dict(zip(markers["row"].to_pylist(), map(Lsn, markers["lsn"].to_pylist()), strict=True))
