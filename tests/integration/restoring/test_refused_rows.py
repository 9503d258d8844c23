"""Rows that a target does not accept: the error names the cause, and its hint says what ends it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import psycopg
import pyarrow as pa
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.nodes.connections import connect, with_database
from cutline.nodes.groups import Column, Group
from cutline.restore.rows.load import Loader, LoadError, LoadTarget, create_ledger
from cutline.restore.rows.refused_rows import INDEX_LIMIT, OTHERS_IN_STEPS, TOO_LARGE, WRONG_COUNT
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.own_shard import database_on
from tests.integration.refusing import execute
from tests.integration.restoring.second_database import SecondDatabase, second_database

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SOURCE, TARGET = "twice", "twice_again"
# On the target, the function returns the same for both rows, as a collation of another version may.
FOLDED = f"""
CREATE FUNCTION folded(v text) RETURNS text IMMUTABLE LANGUAGE sql
AS $$SELECT CASE current_database() WHEN '{SOURCE}' THEN v ELSE lower(v) END$$
"""
STATEMENTS = (
    FOLDED,
    "CREATE TABLE item (id int PRIMARY KEY, v text)",
    "INSERT INTO item VALUES (1, 'a'), (2, 'A'), (3, 'b')",
    "CREATE UNIQUE INDEX item_folded ON item (folded(v))",
)


@pytest.fixture
def place(
    shared_fleet: EmbeddedFleet, tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> Iterator[SecondDatabase]:
    monkeypatch.chdir(tmp_path)
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet, dropping_slots(fleet):
        execute(fleet.primaries[0].dsn, *STATEMENTS)
        runs = Runs(fleet, Ready(spark))
        runs.init()
        runs.full("snp")
        with second_database(fleet, TARGET, tmp_path, spark) as place:
            yield place


def test_a_key_that_occurs_twice_after_the_load_is_shown_and_mended_there(place: SecondDatabase) -> None:
    code, refused = place.run("restore")
    assert (code, refused["error"]) == (10, "ddl-refused"), refused
    shown = 'could not create unique index "item_folded": Key (public.folded(v))=(a) is duplicated.'
    assert shown in refused["message"]
    lines = refused["hint"].splitlines()
    (cause,) = [line for line in lines if line.startswith("two rows have the same key")]
    assert cause.endswith(f"snapshot --fleet {place.fleet.path} check snp --increment 0 --restorable"), cause
    (named,) = [line for line in lines if line.startswith("until the restore ends, the databases have temporary names")]
    loading = named.partition(": ")[2].partition(" on ")[0]
    execute(with_database(place.fleet.primaries[0], loading).dsn, "DELETE FROM item WHERE id = 2")
    code, done = place.run("restore-resume")
    assert (code, done["refused"]) == (0, []), done
    with psycopg.connect(place.dsn) as connection:
        assert connection.execute("SELECT to_regclass('item_folded') IS NOT NULL").fetchone() == (True,)
        assert connection.execute("SELECT array_agg(id ORDER BY id) FROM item").fetchone() == ([1, 3],)


def test_rows_that_an_existing_table_does_not_accept_have_the_hint_of_their_cause(place: SecondDatabase) -> None:
    execute(place.maintenance, f'CREATE DATABASE "{TARGET}"')
    execute(place.dsn, *(statement for statement in STATEMENTS if not statement.startswith("INSERT")))
    code, refused = place.run("restore", "--data-only")
    assert (code, refused["error"]) == (3, "load"), refused
    assert 'violates unique constraint "item_folded": Key (folded(v))=(a) already exists.' in refused["message"]
    lines = refused["hint"].splitlines()
    assert lines[0].startswith("if another session has inserted a row with this key")
    assert lines[1].startswith("otherwise the snapshot has two rows with this key: drop the index")
    assert lines[2].endswith("check snp --increment 0 --restorable")
    # As the second line says; and a rule of the table that the snapshot's has not.
    execute(place.dsn, "DROP INDEX item_folded", "ALTER TABLE item ADD CHECK (id < 3)")
    code, refused = place.run("restore", "--data-only")
    assert (code, refused["error"]) == (3, "load"), refused
    assert refused["hint"].splitlines()[-1] == "after the change, repeat the command"
    execute(place.dsn, "ALTER TABLE item DROP CONSTRAINT item_id_check")
    code, done = place.run("restore", "--data-only")
    assert (code, done["rows"]) == (0, 3), done


def test_a_row_that_outgrew_its_page_is_restored_once_the_source_has_done_what_the_hint_says(
    place: SecondDatabase,
) -> None:
    """PostgreSQL stores rows that are older than a column without it, and accepts no row with all the columns."""
    (source,) = place.fleet.primaries
    columns = ", ".join(f"c{number} bigint DEFAULT {number}" for number in range(1000))
    added = ", ".join(f"ADD d{number} bigint DEFAULT {number}" for number in range(40))
    execute(
        source.dsn,
        "DROP INDEX item_folded",
        f"CREATE TABLE broad (id int PRIMARY KEY, {columns})",
        "INSERT INTO broad SELECT generate_series(1, 3)",
        f"ALTER TABLE broad {added}",
    )
    runs = Runs(place.fleet, Ready(place.spark))
    runs.increment("snp")
    code, refused = place.run("restore")
    assert (code, refused["error"]) == (3, "load"), refused
    assert "row is too big: size 8352, maximum size 8160" in refused["message"]
    assert "COPY broad" in refused["message"]
    lines = refused["hint"].splitlines()
    assert lines == [TOO_LARGE, OTHERS_IN_STEPS]
    execute(source.dsn, f"ALTER TABLE broad {', '.join(f'DROP d{number}' for number in range(30))}")
    runs.increment("snp")
    code, done = place.run("restore")
    assert (code, done["rows"]) == (0, 6), done
    assert sorted_copies(place.dsn)["public.broad"] == sorted_copies(source.dsn)["public.broad"]


def test_a_value_that_an_index_of_the_target_can_not_hold_is_loaded_without_the_index(place: SecondDatabase) -> None:
    # MD5 sums, so that the value can't be compressed.
    long = "(SELECT string_agg(md5(g::text), '') FROM generate_series(1, 200) g)"
    execute(place.fleet.primaries[0].dsn, "DROP INDEX item_folded", f"UPDATE item SET v = {long} WHERE id = 3")
    Runs(place.fleet, Ready(place.spark)).increment("snp")
    execute(place.maintenance, f'CREATE DATABASE "{TARGET}"')
    execute(place.dsn, "CREATE TABLE item (id int PRIMARY KEY, v text)", "CREATE INDEX item_v ON item (v)")
    code, refused = place.run("restore", "--data-only")
    assert (code, refused["error"]) == (3, "load"), refused
    assert 'for index "item_v"' in refused["message"]
    assert refused["hint"].splitlines() == [INDEX_LIMIT, "after the change, repeat the command"]
    execute(place.dsn, "DROP INDEX item_v")
    code, done = place.run("restore", "--data-only")
    assert (code, done["rows"]) == (0, 3), done


def test_a_damaged_line_is_not_to_be_loaded_again(shared_fleet: EmbeddedFleet, tmp_path: Path) -> None:
    columns = (Column("v", "text", 25, -1, 0),)
    with database_on(shared_fleet, SOURCE, tmp_path) as fleet:
        (node,) = fleet.primaries
        execute(node.dsn, "CREATE TABLE note (v text)")
        group = Group(7, "public", "note", "full", 0, columns)
        # COPY would have printed the newline as two characters.
        lines = pa.array([b"one\n", b"two\nthree\n"], pa.binary())
        batch = pa.record_batch([pa.array(np.full(2, 7, np.int32)), lines], names=["group", "row"])
        with connect(node) as connection:
            target = LoadTarget(node, {7: group}, create_ledger(connection))
            with connection.transaction(), pytest.raises(LoadError, match="COPY stored 3 of 2 rows") as raised:
                Loader(connection, target, "task").add(batch, target.groups)
    assert raised.value.hint == WRONG_COUNT
    assert "server's log" not in raised.value.hint
