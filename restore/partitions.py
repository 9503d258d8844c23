"""Partitions whose rows find their place only by way of their root.

A hash of an enum's value is one of its label's oid, and a restored database gives labels other oids: the row of one
partition belongs into another there (pg_dump does the same, "load via partition root").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import psycopg

from fleet.tables.groups import Group

# The topmost ancestor of every leaf that is below one which is partitioned by the hash of an enum.
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


def roots_of(connection: psycopg.Connection[Any], groups: Iterable[Group]) -> dict[int, str]:
    """By group number the quoted name of the table by way of which the group's rows have to be loaded."""
    roots = {(schema, table): root for schema, table, root in connection.execute(ROOTS_QUERY)}
    return {group.number: roots[group.schema, group.table] for group in groups if (group.schema, group.table) in roots}
