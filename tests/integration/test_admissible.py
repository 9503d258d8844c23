"""A table that is not admissible is refused, with the statement that would make it admissible."""

from __future__ import annotations

import psycopg
import pytest

from cutline.fleet.config import GroupRules
from cutline.nodes.connections import connect
from cutline.nodes.groups import Table, read_tables
from cutline.nodes.publications import (
    TableNotAdmissibleError,
    add_to_publications,
    check_admissible,
    ensure_publications,
)
from tests.integration.wal_place import Place, place

__all__ = ["place"]  # the fixture

# Definitions of refused tables, by name.
REFUSED = {
    "late_key": "(id int PRIMARY KEY DEFERRABLE, v int)",
    "later_key": "(id int PRIMARY KEY DEFERRABLE INITIALLY DEFERRED, v int NOT NULL, UNIQUE (v))",
    "nothing": "(id int PRIMARY KEY, v int); ALTER TABLE nothing REPLICA IDENTITY NOTHING",
    "index_dropped": "(id int PRIMARY KEY, v int UNIQUE NOT NULL);"
    " ALTER TABLE index_dropped REPLICA IDENTITY USING INDEX index_dropped_v_key;"
    " ALTER TABLE index_dropped DROP CONSTRAINT index_dropped_v_key",
}


def tables_of(place: Place) -> dict[str, Table]:
    with connect(place.primary) as connection:
        return {table.group.table: table for table in read_tables(connection, GroupRules())}


def takes_updates(place: Place, name: str) -> bool:
    """Whether PostgreSQL itself permits UPDATE and DELETE on the published table."""
    try:
        place.connection.execute(f"UPDATE {name} SET v = v + 10".encode())
        place.connection.execute(f"DELETE FROM {name} WHERE id = 2".encode())
    except psycopg.errors.ObjectNotInPrerequisiteState:
        return False
    return True


def test_the_statement_that_a_refusal_names_admits_the_table(place: Place) -> None:
    for name, definition in REFUSED.items():
        place.connection.execute(f"CREATE TABLE {name} {definition}".encode())
        table = tables_of(place)[name]
        assert not table.is_admissible
        remedy = table.remedy
        place.connection.execute(remedy.partition("  --")[0].encode())
        assert tables_of(place)[name].is_admissible, remedy
    with connect(place.primary) as connection:
        ensure_publications(connection, "test", tables_of(place).values())
    assert all(takes_updates(place, name) for name in tables_of(place))


def test_a_table_that_becomes_append_only_without_a_key_takes_updates(place: Place) -> None:
    """As long as the publication for updates has it, PostgreSQL rejects them."""
    place.connection.execute("CREATE TABLE log (id int PRIMARY KEY, v int)")
    with connect(place.primary) as connection:
        ensure_publications(connection, "test", tables_of(place).values())
        place.connection.execute("ALTER TABLE log DROP CONSTRAINT log_pkey")
        assert not takes_updates(place, "log")
        add_to_publications(connection, "test", read_tables(connection, GroupRules(append_only=("public.log",))))
    assert takes_updates(place, "log")


def test_rows_that_nothing_has_counted_are_not_known(place: Place) -> None:
    plain = "(id int PRIMARY KEY) WITH (autovacuum_enabled = off)"
    for statement in (
        f"CREATE TABLE empty {plain}",
        f"CREATE TABLE filled {plain}", "INSERT INTO filled SELECT generate_series(1, 700)",
        f"CREATE TABLE counted {plain}", "INSERT INTO counted SELECT generate_series(1, 5)", "ANALYZE counted",
    ):  # fmt: skip
        place.connection.execute(statement.encode())
    rows = {name: table.rows_estimate for name, table in tables_of(place).items()}
    assert (rows["empty"], rows["filled"], rows["counted"]) == (0, None, 5)


def test_columns_whose_output_postgresql_can_not_read_are_refused(place: Place) -> None:
    for statement in (
        "CREATE EXTENSION pg_trgm", "CREATE EXTENSION btree_gist", "CREATE DOMAIN tree AS pg_node_tree",
        "CREATE TYPE pair AS (n int, trees tree[])", "CREATE DOMAIN pairs AS pair[]",
        "CREATE TABLE plain (id int PRIMARY KEY, c \"char\", b box, v tsvector)",
        "CREATE TABLE parsed (id int PRIMARY KEY, many gtsvector[], t pairs, g gtrgm, u int, k gbtreekey_var)",
        # Two columns of one type, and a dropped column.
        "CREATE TABLE more (id int PRIMARY KEY, a gtrgm, b tree, c gtrgm); ALTER TABLE more DROP a",
    ):  # fmt: skip
        place.connection.execute(statement.encode())
    with pytest.raises(TableNotAdmissibleError) as refused:
        check_admissible({"s1": list(tables_of(place).values())})
    columns = [
        "column b (pg_node_tree) of public.more on s1", "column c (public.gtrgm) of public.more on s1",
        "column many (gtsvector) of public.parsed on s1", "column t (pg_node_tree) of public.parsed on s1",
        "column g (public.gtrgm) of public.parsed on s1", "column k (public.gbtreekey_var) of public.parsed on s1",
    ]  # fmt: skip
    assert refused.value.details["columns"] == columns
    assert refused.value.message.endswith(f" {', '.join(columns[:5])} and 1 more")
    assert "groups.exclude" in (refused.value.hint or "")
