"""Record that a restore has ended, and remove what it kept on its targets."""

from __future__ import annotations

from collections.abc import Iterable

from cutline.fleet.config import Fleet
from cutline.restore.existing_tables import remove_fillings
from cutline.restore.report import NodeReport, RestoreReport
from cutline.restore.routing.routes import parse_route
from cutline.restore.targets.database_records import DatabaseRecord
from cutline.restore.targets.databases import clear_records, end_chains
from cutline.restore.targets.target import Connections, Target
from cutline.restore.topology.topology import ShownRoute
from cutline.restore.unfinished import UnfinishedRestore
from cutline.snapshots.operations.operation import record_outcome
from cutline.snapshots.records.operation_records import DONE, read_intent
from cutline.storage.store import ObjectStore


def end_published(
    store: ObjectStore,
    fleet: Fleet,
    found: UnfinishedRestore,
    provisional: Iterable[Target],
    connections: Connections,
    planned: RestoreReport | None,
) -> RestoreReport:
    """End a restore of which nothing is missing but its outcome.

    `planned` is its report as its plan has it, None if the snapshot is gone by now.
    """
    record = found.last_record
    provisional = list(provisional)
    filled = [one for one in provisional if found.is_filling and one.shard in found.records]
    # What has its outcome in the store is not looked for any more; without a store the record is the outcome.
    if record.in_store:
        remove_fillings(filled, found.suffix)
    targets = [one.named(found.suffix) for one in provisional if one.shard in found.records]
    nodes = [NodeReport(one.node.id, one.database, found.records[one.shard].rows) for one in targets]
    report = planned or _report_of(record, nodes)
    report.nodes, report.is_resumed = nodes, True
    ending = store if record.in_store else None
    report.slots_dropped, report.slots_left = end_chains(ending, fleet, targets, connections, record.operation)
    report.aside = [f"{one.node.id}: {one.aside}" for one in targets if found.records[one.shard].aside]
    if record.in_store:
        record_outcome(store, read_intent(store, record.operation), DONE)
    report.warnings += clear_records(targets, connections)
    if not record.in_store:
        remove_fillings(filled, found.suffix)
    report.rows = sum(node.rows for node in nodes)
    return report


def _report_of(record: DatabaseRecord, nodes: list[NodeReport]) -> RestoreReport:
    """What the record alone says: it has the numbers of borrowed tables, not their names."""
    return RestoreReport(
        record.snapshot,
        record.increment,
        record.operation,
        nodes,
        scope=record.scope,
        warnings=[
            f"rows were taken from the copy of {node}; the snapshot, which has the names of the {len(numbers)} tables,"
            " can't be read"
            for node, numbers in record.borrowed.items()
        ],
        moved=[f"{node.node}: {move.label}" for node in nodes for move in record.scope.moves],
        routes=[ShownRoute(route.pattern, route.text) for route in map(parse_route, record.routes)],
    )
