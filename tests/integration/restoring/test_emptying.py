"""Filled tables are emptied whatever keys are between them, into them and from them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from cutline.fleet.config import GroupRules, Node
from cutline.nodes.groups import read_tables
from cutline.restore.rows.fill_checks import WantedRows, check_tables
from cutline.restore.rows.filling import Filling
from cutline.restore.rows.load import TablesInUseError
from cutline.restore.targets.obstacles import Obstacles
from cutline.storage.errors import SnapshotError
from tests.integration.refusing import execute

WAIT_SECONDS_MAX = 30
A_TO_B_TO_C = (
    "CREATE TABLE c (id int PRIMARY KEY)",
    "CREATE TABLE b (id int PRIMARY KEY REFERENCES c)",
    "CREATE TABLE a (id int PRIMARY KEY REFERENCES b)",
)
LEAF = "CREATE TABLE {0}_1 PARTITION OF {0} FOR VALUES IN (1)"
# The tables, those that are filled, and those of them whose rows have to be deleted.
CASES = {
    "a chain inside": (A_TO_B_TO_C, "abc", ""),
    "a chain from outside": ((*A_TO_B_TO_C, "CREATE TABLE o (id int REFERENCES a)"), "abc", "abc"),
    "a chain in the midst": ((*A_TO_B_TO_C, "CREATE TABLE o (id int REFERENCES b)"), "abc", "bc"),
    "to the outside": (A_TO_B_TO_C, "ab", ""),
    "a circle": ((*A_TO_B_TO_C, "ALTER TABLE c ADD FOREIGN KEY (id) REFERENCES a"), "abc", ""),
    "a circle from outside": (
        (*A_TO_B_TO_C, "ALTER TABLE c ADD FOREIGN KEY (id) REFERENCES a", "CREATE TABLE o (id int REFERENCES c)"),
        "abc",
        "abc",
    ),
    "itself": (("CREATE TABLE a (id int PRIMARY KEY REFERENCES a)",), "a", ""),
    "from a partitioned table": (
        (*A_TO_B_TO_C, "CREATE TABLE p (id int REFERENCES b) PARTITION BY LIST (id)", LEAF.format("p")),
        ("a", "b", "c", "p_1"),
        "bc",
    ),
    "to a partitioned table": (
        ("CREATE TABLE p (id int PRIMARY KEY) PARTITION BY LIST (id)", LEAF.format("p"),
         "CREATE TABLE a (id int REFERENCES p)"),
        ("a", "p_1"),
        "",
    ),
    "from outside to a partitioned table": (
        ("CREATE TABLE b (id int PRIMARY KEY)",
         "CREATE TABLE p (id int PRIMARY KEY REFERENCES b) PARTITION BY LIST (id)", LEAF.format("p"),
         "CREATE TABLE o (id int REFERENCES p)"),
        ("b", "p_1"),
        ("b", "p_1"),
    ),
}  # fmt: skip


@pytest.fixture
def session(node: Node) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        yield connection
        connection.execute("DROP TABLE IF EXISTS public.a, public.b, public.c, public.o, public.p CASCADE")


@pytest.mark.parametrize("case", CASES)
def test_all_is_emptied_and_what_can_be_is_truncated(node: Node, session: psycopg.Connection[Any], case: str) -> None:
    definitions, filled, deleted = CASES[case]
    for definition in definitions:
        session.execute(definition.encode())
    groups = [one.group for one in read_tables(session, GroupRules()) if one.group.table in tuple(filled)]
    assert len(groups) == len(filled)
    filling = Filling(node.id, session, "0123456789")
    with session.transaction():
        filling.begin(groups)
    session.execute("SET session_replication_role = replica")
    files = {}
    for name in filled:
        session.execute(f"INSERT INTO {name} VALUES (1)".encode())
        files[name] = session.execute("SELECT pg_relation_filenode(%s::text::regclass)", (name,)).fetchone()
    session.execute("RESET session_replication_role")
    assert sorted(filling.undo()) == sorted(f"public.{name}" for name in filled)
    # It leaves the session with the search_path that ours have.
    session.execute("SET search_path = public")
    for name in filled:
        assert session.execute(f"SELECT count(*) FROM {name}".encode()).fetchone() == (0,)
        # A table that is truncated gets a new file.
        kept = session.execute("SELECT pg_relation_filenode(%s::text::regclass)", (name,)).fetchone() == files[name]
        assert kept == (name in deleted), name


def test_the_privilege_to_delete_is_asked_for_where_rows_are_deleted(
    node: Node, session: psycopg.Connection[Any]
) -> None:
    definitions, filled, _ = CASES["a chain in the midst"]
    for definition in definitions:
        session.execute(definition.encode())
    groups = [one.group for one in read_tables(session, GroupRules()) if one.group.table in tuple(filled)]
    execute(node.dsn, "CREATE ROLE filler", "GRANT SELECT, INSERT, TRUNCATE ON a, b, c TO filler")
    try:
        session.execute("SET ROLE filler")
        obstacles = Obstacles()
        check_tables(node, session, WantedRows(groups, [], "UTF8"), obstacles)
        with pytest.raises(SnapshotError) as raised:
            obstacles.raise_found()
        assert "lacks privileges on tables of database shop: public.b (DELETE), public.c (DELETE)" in str(
            raised.value.message
        )
    finally:
        session.execute("RESET ROLE")
        session.execute("DROP OWNED BY filler; DROP ROLE filler")


def begun(session: psycopg.Connection[Any], node: Node, tables: str) -> Filling:
    for name in tables:
        session.execute(f"CREATE TABLE {name} (id int)".encode())
    groups = [one.group for one in read_tables(session, GroupRules()) if one.group.table in tuple(tables)]
    filling = Filling(node.id, session, "0123456789")
    with session.transaction():
        filling.begin(groups)
    return filling


def test_sessions_that_our_role_may_not_end_are_left_out(node: Node, session: psycopg.Connection[Any]) -> None:
    filling = begun(session, node, "a")
    session.execute(f"CREATE ROLE filler; GRANT USAGE ON SCHEMA {filling.schema} TO filler".encode())
    try:
        with psycopg.connect(node.dsn) as other:
            other.execute(f"SELECT FROM {filling.ledger}".encode())
            session.execute("SET ROLE filler")
            filling.end_loading()
            assert other.execute("SELECT 1").fetchone() == (1,)
            session.execute("RESET ROLE")
            filling.end_loading()
            with pytest.raises(psycopg.OperationalError):
                other.execute("SELECT 1")
    finally:
        session.execute("RESET ROLE")
        filling.undo()
        session.execute("DROP OWNED BY filler; DROP ROLE filler")


def test_a_deadlock_is_not_called_a_timeout(node: Node, session: psycopg.Connection[Any]) -> None:
    filling = begun(session, node, "ab")
    with psycopg.connect(node.dsn) as other, ThreadPoolExecutor(1) as pool:
        # The other session is to be the one that is not ended.
        other.execute("SET deadlock_timeout = '1min'")
        other.execute("LOCK TABLE b IN ACCESS SHARE MODE")
        undoing = pool.submit(filling.undo)
        deadline = time.monotonic() + WAIT_SECONDS_MAX
        while other.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() != (1,):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        other.execute("LOCK TABLE a IN ACCESS SHARE MODE")
        with pytest.raises(TablesInUseError, match=rf"node {node.id}: .* locked them in a different order"):
            undoing.result()
    assert len(filling.undo()) == 2
