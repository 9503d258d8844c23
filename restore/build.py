"""Making one database of a restore: what is there before the rows, and what comes after them.

Nothing of the snapshot's own acts on the rows while they are loaded and counted: indexes, constraints, triggers, rules
and policies come after that, and event triggers at the very end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fleet.connections import connect
from fleet.progress import Progress
from restore.ddl import refresh_views, run_section, set_sequences, shown, views_of, without_foreign_keys
from restore.ledger import LEDGER_SCHEMA, check_counts, create_ledger
from restore.partitions import roots_of
from restore.target import Target
from snapshots.schema import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH, listed_schema, read_schema
from snapshots.search_path import search_path_of
from wal.damage import read_listed

if TYPE_CHECKING:
    from restore.restore import Restoring


def read_scripts(restoring: Restoring, shard: str) -> dict[str, str]:
    """A shard's DDL by section."""
    found: dict[str, str] = {}
    for stored in listed_schema(restoring.chain, shard):
        body = read_listed(restoring.store, shard, stored.key, (stored.size, stored.digest))
        found[stored.kind] = read_schema(body, stored)
    if restoring.request.groups:
        found[POST_DATA], keys = without_foreign_keys(found[POST_DATA])
        left_out = [f"foreign key {name}" for name in keys]
        # Filled from a part of the tables they would be wrong, and nobody could tell.
        left_out += [f"rows of materialized view {shown(name)}" for name in views_of(found[REFRESH])]
        found[REFRESH] = ""
        restoring.report.left_out += [f"{what} on {shard}" for what in left_out]
    return found


def create_empty(restoring: Restoring, target: Target, scripts: Mapping[str, str]) -> None:
    """Create in the new database all that rows need, and its ledger."""
    restoring.search_paths[target.shard] = search_path_of(scripts[PRE_DATA])
    run_section(target.loaded, PRE_DATA, scripts[PRE_DATA])
    with connect(target.loaded) as loading:
        create_ledger(loading)
        restoring.roots[target.shard] = roots_of(loading, restoring.groups(target.shard))


def finish(restoring: Restoring, target: Target, scripts: Mapping[str, str], progress: Progress) -> None:
    """Count the rows against the ledger; then indexes, keys and triggers, sequences, materialized views."""
    began = time.monotonic()
    with connect(target.loaded) as connection:
        rows = check_counts(connection, target.node.id, restoring.groups(target.shard), restoring.roots[target.shard])
        connection.execute(f"DROP SCHEMA {LEDGER_SCHEMA} CASCADE")
    run_section(target.loaded, POST_DATA, scripts[POST_DATA])
    with connect(target.loaded) as connection:
        set_sequences(connection, restoring.chain.sequences(target.shard))
    for problem in refresh_views(target.loaded, scripts[REFRESH], restoring.search_paths[target.shard]):
        progress.note(problem)
    run_section(target.loaded, EVENT_TRIGGERS, scripts[EVENT_TRIGGERS])
    report = next(node for node in restoring.report.nodes if node.node == target.node.id)
    report.rows = rows
    report.seconds += time.monotonic() - began
