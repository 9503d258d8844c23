"""Build one database of a restore: what is there before the rows, and what comes after them.

Nothing of the snapshot's own acts on the rows while they are loaded and counted: indexes, constraints, triggers, rules
and policies come after that, and event triggers last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet.config import Node
from fleet.nodes.connections import connect
from fleet.tables.groups import Group
from restore.ddl import refresh_views, run_section, set_sequences, show_name, views_of, without_foreign_keys
from restore.ledger import LEDGER_SCHEMA, check_counts, create_ledger
from restore.load_target import LoadTarget
from restore.partitions import roots_of
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH, find_schema_object, read_schema
from snapshots.ddl.search_path import search_path_of
from snapshots.records.chain import Chain
from snapshots.records.commit import Sequence
from storage.store import ObjectStore
from wal.segments.damage import read_listed


def read_scripts(store: ObjectStore, chain: Chain, shard: str) -> dict[str, str]:
    """Read a shard's DDL, by section."""
    found: dict[str, str] = {}
    for stored in find_schema_object(chain, shard):
        body = read_listed(store, shard, stored.key, (stored.size, stored.digest))
        found[stored.kind] = read_schema(body, stored)
    return found


def without_dependents(scripts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The scripts for some of the tables: no foreign keys, no rows of materialized views. Names what is left out."""
    post_data, keys = without_foreign_keys(scripts[POST_DATA])
    # Filled from a part of the tables they would be wrong, and nobody could tell.
    views = [f"rows of materialized view {show_name(name)}" for name in views_of(scripts[REFRESH])]
    return {**scripts, POST_DATA: post_data, REFRESH: ""}, [*(f"foreign key {name}" for name in keys), *views]


def create_tables(database: Node, scripts: Mapping[str, str], groups: Iterable[Group]) -> LoadTarget:
    """Create in the empty database all that rows need, and the ledger of the load."""
    run_section(database, PRE_DATA, scripts[PRE_DATA])
    with connect(database) as connection:
        create_ledger(connection)
        chosen = {group.number: group for group in groups}
        roots = roots_of(connection, chosen.values())
        return LoadTarget(database, chosen, roots, search_path_of(scripts[PRE_DATA]))


def check_rows(target: LoadTarget) -> int:
    """Count the rows against the ledger, drop the ledger, and return their number; raise LoadError."""
    with connect(target.node) as connection:
        rows = check_counts(connection, target.node.id, list(target.groups.values()), target.roots)
        connection.execute(f"DROP SCHEMA {LEDGER_SCHEMA} CASCADE")
    return rows


def finish_database(target: LoadTarget, scripts: Mapping[str, str], sequences: Iterable[Sequence]) -> list[str]:
    """Run what comes after the rows: indexes, keys and triggers, sequences, materialized views, event triggers.

    Returns why views are not populated, a line each.
    """
    run_section(target.node, POST_DATA, scripts[POST_DATA])
    with connect(target.node) as connection:
        set_sequences(connection, sequences)
    problems = refresh_views(target.node, scripts[REFRESH], target.search_path)
    run_section(target.node, EVENT_TRIGGERS, scripts[EVENT_TRIGGERS])
    return problems
