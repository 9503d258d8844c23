"""Build one database of a restore: the tables before the rows, and the rest of the DDL after them.

No index, constraint, trigger, rule or policy of the snapshot acts on the rows while they are loaded and counted: all
of these are created afterwards, event triggers last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fleet.config import Node
from fleet.nodes.connections import connect
from fleet.tables.groups import Group
from restore.ddl import find_views, refresh_views, remove_foreign_keys, run_section, set_sequences, show_name
from restore.ledger import check_counts, create_ledger, drop_ledger
from restore.load_target import LoadTarget
from restore.partition_roots import find_roots
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA, REFRESH, find_ddl_objects, read_ddl
from snapshots.ddl.search_path import search_path_of
from snapshots.records.chain import Chain
from snapshots.records.commit import Sequence
from storage.store import ObjectStore
from wal.segments.damage import read_listed


def read_scripts(store: ObjectStore, chain: Chain, shard: str) -> dict[str, str]:
    """Read a shard's DDL, by section."""
    scripts: dict[str, str] = {}
    for stored in find_ddl_objects(chain, shard):
        body = read_listed(store, shard, stored.key, (stored.size, stored.digest))
        scripts[stored.kind] = read_ddl(body, stored)
    return scripts


def remove_dependents(scripts: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Adapt the scripts to a restore of some tables: drop foreign keys and the refresh of materialized views.

    Returns the scripts, and what was dropped by name.
    """
    post_data, keys = remove_foreign_keys(scripts[POST_DATA])
    # A view that is filled from some of the tables would be wrong, and nothing would show it.
    views = [f"rows of materialized view {show_name(name)}" for name in find_views(scripts[REFRESH])]
    return {**scripts, POST_DATA: post_data, REFRESH: ""}, [*(f"foreign key {name}" for name in keys), *views]


def create_tables(database: Node, scripts: Mapping[str, str], groups: Iterable[Group]) -> LoadTarget:
    """Create in the empty database everything that the rows need, and the ledger of the load."""
    run_section(database, PRE_DATA, scripts[PRE_DATA])
    with connect(database) as connection:
        chosen = {group.number: group for group in groups}
        roots = find_roots(connection, chosen.values())
        ledger = create_ledger(connection)
        return LoadTarget(database, chosen, ledger, roots, search_path_of(scripts[PRE_DATA]))


def check_rows(target: LoadTarget) -> int:
    """Compare the row counts with the ledger, drop the ledger, and return the number of rows; raise LoadError."""
    with connect(target.node) as connection:
        rows = check_counts(connection, target)
        drop_ledger(connection, target.ledger)
    return rows


def finish_database(target: LoadTarget, scripts: Mapping[str, str], sequences: Iterable[Sequence]) -> list[str]:
    """Restore what comes after the rows: indexes, keys and triggers, sequences, materialized views, event triggers.

    Returns one line for each materialized view that could not be populated, with the reason.
    """
    run_section(target.node, POST_DATA, scripts[POST_DATA])
    with connect(target.node) as connection:
        set_sequences(connection, sequences)
    problems = refresh_views(target.node, scripts[REFRESH], target.search_path)
    run_section(target.node, EVENT_TRIGGERS, scripts[EVENT_TRIGGERS])
    return problems
