"""Compare the objects that the DDL has created with those that the commit lists, before any row is loaded.

A table that the commit does not list would come back empty, a sequence at its start, and nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from cutline.fleet.config import GroupRules
from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.groups import Group, read_tables
from cutline.restore.rows.load import LoadError
from cutline.snapshots.records.chain import Chain

# Those of extensions are as the target's extension makes them.
SEQUENCES_QUERY = """
SELECT n.nspname, c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE c.relkind = 'S' AND c.relpersistence = 'p' AND n.nspname !~ '^pg_'
   AND NOT EXISTS (SELECT FROM pg_depend e WHERE e.classid = 'pg_class'::regclass
                      AND e.objid = c.oid AND e.deptype = 'e')
"""
NAMED_MAX = 5


def check_against_ddl(chain: Chain, shard: str, connection: psycopg.Connection[Any], groups: Iterable[Group]) -> None:
    """Raise LoadError unless the database has all of `groups`, and no table or sequence that the commit lacks."""
    # Read as at the source, so that names in any encoding have the same form.
    present = {table.group.name: table.group for table in read_tables(connection, GroupRules())}
    for group in groups:
        created = present.get(group.name)
        if created is None:
            raise _error(shard, f"its DDL has no table {group.name}, although the commit lists rows of it")
        if {column.name for column in created.columns} != {column.name for column in group.columns}:
            raise _error(shard, f"its DDL has other columns of table {group.name} than the commit")
    # A commit lacks a table that was dropped while it was made. Tables that the rules exclude have no rows.
    listed = {group.name for group in chain.groups(shard)}
    left_out = {out.name for out in chain.left_out if out.node == shard}
    if unknown := sorted(name for name in present.keys() - listed - left_out if is_included(name, chain.full.rules)):
        raise _error(shard, f"its commit lists no rows of table {', '.join(unknown[:NAMED_MAX])}")
    sequences = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
    created_sequences = {(schema, name) for schema, name in connection.execute(SEQUENCES_QUERY)}
    if missing := sorted(table_name(*created_sequence) for created_sequence in created_sequences - sequences):
        raise _error(shard, f"its commit has no value of sequence {', '.join(missing[:NAMED_MAX])}")


def _error(shard: str, detail: str) -> LoadError:
    return LoadError(
        f"the commit and the stored DDL of shard {shard} contradict each other: {detail}",
        hint="somebody changed the store: put its objects back from a copy; see: snapshot check",
        details={"node": shard},
    )
