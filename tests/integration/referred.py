"""Tables that others refer to, and the verification of foreign keys that follows a load into tables that exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from cutline.fleet.config import GroupRules, Node
from cutline.nodes.groups import read_tables
from cutline.nodes.watch import watch_nodes
from cutline.restore.rows.load import LoadTarget
from cutline.restore.rows.references import verify_references

PARENTS = """
CREATE TABLE parent (a int, b text, PRIMARY KEY (a, b)) PARTITION BY LIST (a);
CREATE TABLE parent_1 PARTITION OF parent FOR VALUES IN (1);
CREATE TABLE parent_2 PARTITION OF parent FOR VALUES IN (2);
INSERT INTO parent VALUES (1, 'x'), (2, 'y')
"""


@contextmanager
def parents_on(node: Node) -> Iterator[psycopg.Connection[Any]]:
    """A session in a database that has the parents; at the end they are dropped, and `child`."""
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        connection.execute(PARENTS)
        yield connection
        connection.execute("DROP TABLE IF EXISTS child; DROP TABLE parent")


def verify(node: Node, session: psycopg.Connection[Any], table: str) -> None:
    """Verify the keys of the table, and those into it, as if it had been filled."""
    groups = [one.group for one in read_tables(session, GroupRules()) if one.group.table == table]
    assert groups
    with watch_nodes([node]) as watch:
        verify_references(LoadTarget(node, dict(enumerate(groups)), ""), watch)
