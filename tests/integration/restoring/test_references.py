"""The foreign keys that nothing checks while rows are loaded are verified as PostgreSQL itself would."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from cutline.fleet.config import Node
from cutline.restore.rows.filled_tables import find_oids
from cutline.restore.rows.references import ForeignKeyViolatedError, find_orphan
from tests.integration.referred import parents_on, verify

KEY_QUERY = """
SELECT pg_get_constraintdef(oid) FROM pg_constraint
 WHERE conrelid = 'child'::regclass AND contype = 'f' AND conparentid = 0
"""
LEAVES = "CREATE TABLE {0}_0 PARTITION OF {0} FOR VALUES FROM (0) TO (10); CREATE TABLE {0}_1 PARTITION OF {0} DEFAULT"
# What the table is, a row that refers to none, the table that is filled, and what the error says; None: no error.
CASES = [
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent)", "(1, 'y')", "child", "(a, b) = (1, y)"),
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent)", "(1, 'y')", "parent_2", "(a, b) = (1, y)"),
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent)", "(1, 'y')", "kind", None),
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent)", "(3, NULL)", "child", None),
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent MATCH FULL)", "(1, NULL)", "child", "(1, NULL)"),
    ("child (a bigint, b varchar(3) COLLATE \"C\", FOREIGN KEY (a, b) REFERENCES parent)", "(2, 'x')", "child", "2, x"),
    ("child (a int, b text, FOREIGN KEY (a, b) REFERENCES parent) PARTITION BY RANGE (a)", "(2, 'x')", "child_0", "x"),
    ("child (\"A a\" int PRIMARY KEY, \"b's\" int REFERENCES child)", "(1, 2)", "child", "(b's) = (2)"),
]  # fmt: skip


@pytest.fixture
def session(node: Node) -> Iterator[psycopg.Connection[Any]]:
    with parents_on(node) as connection:
        yield connection


@pytest.mark.parametrize(("definition", "row", "filled", "said"), CASES)
def test_a_row_that_refers_to_none_is_found(
    node: Node, session: psycopg.Connection[Any], definition: str, row: str, filled: str, said: str | None
) -> None:
    session.execute(f"CREATE TABLE {definition}".encode())
    if "PARTITION BY" in definition:
        session.execute(LEAVES.format("child").encode())
    verify(node, session, filled)
    session.execute("SET session_replication_role = replica")
    session.execute(f"INSERT INTO child VALUES {row}".encode())
    if said is None:
        verify(node, session, filled)
        return
    with pytest.raises(ForeignKeyViolatedError) as raised:
        verify(node, session, filled)
    assert said in raised.value.message
    assert raised.value.details["table"] == "public.child"
    # PostgreSQL finds the same.
    (key,) = session.execute(KEY_QUERY).fetchone() or ("",)
    with pytest.raises(psycopg.errors.ForeignKeyViolation):
        session.execute(f"ALTER TABLE child ADD {key}".encode())


def test_a_key_that_is_not_valid_promises_nothing(node: Node, session: psycopg.Connection[Any]) -> None:
    session.execute("CREATE TABLE child (a int, b text); INSERT INTO child VALUES (1, 'y')")
    session.execute("ALTER TABLE child ADD FOREIGN KEY (a, b) REFERENCES parent NOT VALID")
    verify(node, session, "child")


def planted(*types: str) -> tuple[str, str]:
    return (
        f"CREATE FUNCTION theirs({', '.join(types)}) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RETURN true; END'",
        f"CREATE OPERATOR = (LEFTARG = {types[0]}, RIGHTARG = {types[1]}, FUNCTION = theirs)",
    )


def test_a_key_is_verified_by_its_own_operator(node: Node) -> None:
    """Anybody may make another one of its name in its schema, for the columns' own types, which would be preferred."""
    with psycopg.connect(node.dsn, autocommit=True) as connection:
        for statement in (
            "CREATE EXTENSION citext",
            "CREATE DOMAIN named AS citext",
            "CREATE TYPE mood AS ENUM ('good', 'bad')",
            "CREATE TABLE key (k named, m mood, a int[], v varchar(5), c char(3), r int4range, n int,"
            " PRIMARY KEY (k, m, a, v, c, r, n))",
            "CREATE TABLE use (k named, m mood, a int[], v varchar(9), c char(3), r int4range, n bigint,"
            " CONSTRAINT used FOREIGN KEY (k, m, a, v, c, r, n) REFERENCES key)",
            *planted("named", "named"),
            *planted("named", "citext"),
            *planted("citext", "named"),
            "INSERT INTO key VALUES ('a', 'good', '{1,2}', 'v', 'c', '[1,3)', 7)",
            "INSERT INTO use VALUES ('A', 'good', '{1,2}', 'v', 'c', '[1,3)', 7)",
        ):
            connection.execute(statement.encode())
        oids = find_oids(connection, ["public.use"])
        assert find_orphan(node.id, connection, oids) is None
        connection.execute("SET session_replication_role = replica; SET search_path = public")
        connection.execute("UPDATE use SET k = 'b'")
        assert connection.execute("SELECT k = k FROM key").fetchone() == (True,)
        orphan = find_orphan(node.id, connection, oids)
        assert orphan is not None
        assert (orphan.name, orphan.values) == ("used", "b, good, {1,2}, v, c, [1,3), 7")
