"""Rows come back exactly, by PostgreSQL's own output: every type, every statement, every shape of table.

Restored are the chain's last state and one drawn from those before; in the long form all of them.
"""

from __future__ import annotations

import re
from typing import Any

import psycopg
import pytest

from cutline.nodes.connections import connect
from cutline.nodes.pinned_settings import PINNED_SETTINGS
from tests.chains.exact_chain import EXACT, LAST, OTHER, REDEFINED, RESTORED, ROLE_SETTINGS, History, differences
from tests.chains.exact_databases import CASES, FUNCTIONS, RULES
from tests.run.soak import SOAK_SECONDS
from tests.tables import shaped_tables

# The first test waits for the whole chain.
pytestmark = pytest.mark.timeout(1800 if SOAK_SECONDS else 900)
# Standbys of earlier versions can't decode their WAL.
STANDBYS_VERSION = 160000


@pytest.mark.parametrize("increment", RESTORED)
def test_every_type_comes_back_as_key_and_as_value(history: History, increment: int) -> None:
    typed = history.exact.typed
    assert history.assert_same(EXACT, increment, "types", "own") >= len(typed) > 120
    if increment in (1, 2):
        assert history.changed_tables("types", increment) >= {table.name for table in typed if len(table.keys) > 1}


@pytest.mark.parametrize("case", CASES)
def test_what_statements_did_comes_back(history: History, case: str) -> None:
    for increment in RESTORED:
        assert history.assert_same(EXACT, increment, case) > 0
    assert history.changed_tables(case, 1)
    assert history.changed_tables(case, 2)


SCHEMAS = sorted({*shaped_tables.NAMES, *(schema for schema, _ in shaped_tables.SAME_NAMES)})


@pytest.mark.parametrize("schema", SCHEMAS)
def test_names_of_every_kind_come_back(history: History, schema: str) -> None:
    for increment in RESTORED:
        assert history.assert_same(EXACT, increment, schema_text(schema)) > 0
    assert history.changed_tables(schema_text(schema), 1)


def schema_text(name: str) -> str:
    """Return the schema's name as format's %I prints it."""
    plain = re.fullmatch(r"[a-z_][a-z0-9_]*", name) and name not in ("select", "user", "null")
    return name if plain else '"' + name.replace('"', '""') + '"'


def test_rows_of_1600_columns_come_back(history: History) -> None:
    for increment in RESTORED:
        assert history.assert_same(EXACT, increment, "widest") == 2
    assert history.changed_tables("widest", 1) == {"widest.numbers", "widest.texts"}


def test_large_values_that_updates_left_alone_come_back_after_many_increments(history: History) -> None:
    for increment in RESTORED:
        assert history.assert_same(EXACT, increment, "toast") >= 3
    for increment in range(1, LAST + 1):
        assert history.changed_tables("toast", increment)


@pytest.mark.parametrize(("shard", "schema"), [(EXACT, "public"), (REDEFINED, FUNCTIONS)], ids=["usual", "set"])
def test_rows_whose_functions_depend_on_the_search_path_come_back(history: History, shard: str, schema: str) -> None:
    for increment in RESTORED:
        assert history.assert_same(shard, increment, schema) > 0
        lines = history.restored[increment][shard].rows[0][f"{schema}.admitted"].count(b"\n")
        assert lines == (4 if increment else 3)


@pytest.mark.parametrize("increment", RESTORED)
@pytest.mark.parametrize("shard", [EXACT, REDEFINED])
def test_every_table_and_sequence_comes_back_with_the_ddl_of_its_cut(
    history: History, shard: str, increment: int
) -> None:
    expected, found = history.states[increment][shard], history.restored[increment][shard]
    history.assert_same(shard, increment)
    assert differences(found.ddl.splitlines(), expected.ddl.splitlines()) == []
    assert expected.ddl.count("\n") > 1000
    assert found.sequences == expected.sequences


def test_primaries_and_standbys_hold_the_same_rows(history: History) -> None:
    report = history.check()
    assert report.conflicts == []
    assert report.compared.partitions >= sum(
        bool(rows) for shard in (EXACT, REDEFINED) for rows in history.states[LAST][shard].rows[0].values()
    ) - len(RULES.not_copied)
    if all(decodes_on_standbys(dsn) for dsn in history.databases.values()):
        assert (report.result, report.skipped) == ("valid", [])
    else:
        assert (report.result, [one.what for one in report.skipped]) == ("inconclusive", [f"rows of shard {OTHER}"])


def decodes_on_standbys(dsn: str) -> bool:
    with psycopg.connect(dsn) as connection:
        return connection.info.server_version >= STANDBYS_VERSION


@pytest.mark.skipif(not SOAK_SECONDS, reason="the long form: CUTLINE_SOAK=1; test_encodings.py checks an increment too")
def test_every_increment_is_checked(history: History) -> None:
    for increment in range(LAST):
        assert history.runs.check_one("exact", increment).conflicts == []


def test_no_setting_of_a_role_reaches_our_sessions(history: History) -> None:
    node = history.runs.fleet.node(EXACT)
    pinned = ROLE_SETTINGS.keys() & PINNED_SETTINGS.keys()
    with psycopg.connect(node.dsn) as odd, connect(node) as ours:
        for name in sorted(pinned):
            assert setting_of(odd, name) != setting_of(ours, name), name
    assert ROLE_SETTINGS.keys() - pinned == {"client_encoding"}


def setting_of(connection: psycopg.Connection[Any], name: str) -> object:
    row = connection.execute("SELECT current_setting(%s)", (name,)).fetchone()
    assert row is not None
    return row[0]
