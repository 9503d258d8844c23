"""Partitions whose rows must be loaded through their partitioned root.

PostgreSQL hashes an enum value by its label's oid, and labels have other oids in a restored database: a row of one
partition may belong to another there. pg_dump does the same (`--load-via-partition-root`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from cutline.fleet.tables.groups import Group

# The root of every leaf partition below a table that is partitioned by the hash of an enum.
ROOTS_QUERY = """
WITH RECURSIVE unsafe AS (
    SELECT p.partrelid FROM pg_partitioned_table p
     WHERE (SELECT c.oid FROM pg_opclass c JOIN pg_am a ON a.oid = c.opcmethod
             WHERE c.opcname = 'enum_ops' AND c.opcnamespace = 'pg_catalog'::regnamespace AND a.amname = 'hash')
           = ANY (p.partclass)),
below AS (
    SELECT partrelid AS relid FROM unsafe
    UNION
    SELECT h.inhrelid FROM below b JOIN pg_inherits h ON h.inhparent = b.relid
)
SELECT n.nspname, c.relname, format('%I.%I', rn.nspname, r.relname)
  FROM below b JOIN pg_class c ON c.oid = b.relid AND c.relkind = 'r' JOIN pg_namespace n ON n.oid = c.relnamespace
  JOIN pg_class r ON r.oid = pg_partition_root(c.oid) JOIN pg_namespace rn ON rn.oid = r.relnamespace
"""


def find_roots(connection: psycopg.Connection[Any], groups: Iterable[Group]) -> dict[int, str]:
    """The quoted name of the root that a group's rows must be loaded through, by group number."""
    roots = {(schema, table): root for schema, table, root in connection.execute(ROOTS_QUERY)}
    return {group.number: roots[group.schema, group.table] for group in groups if (group.schema, group.table) in roots}
