"""What others do with tables while `restore --data-only` fills them, and until it is undone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import psycopg
import pytest

from fleet.config import Node
from fleet.progress import Silent
from restore.abandoning import abandon_restore
from restore.crash_points import RestoreCrashPoint
from restore.data_only.checker import TablesUnfitError
from restore.data_only.filling import TablesChangedError, TablesInUseError
from restore.data_only.references import ForeignKeyViolatedError
from restore.request import RestoreRequest
from restore.restore import resume_restore
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.refusing import execute
from tests.integration.restoring.filled import assert_empty, assert_filled, leave, load, rows_of, tables_to_fill
from tests.integration.restoring.target_place import NAME, SHARDS, Place

COMMIT_AFTER_SECONDS = 3


def at(point: RestoreCrashPoint, act: Callable[[], object], count: int = 1) -> Watching:
    """Act at the point."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            act()

    return Watching(then)


def abandon(place: Place) -> None:
    abandon_restore(place.fleet, place.target, NAME, print, Silent())


@pytest.fixture
def node(place: Place) -> Iterator[Node]:
    """The second target, with tables to fill as all have."""
    with tables_to_fill(place):
        yield place.target.primaries[1]


def test_nobody_alters_the_tables_while_they_are_filled(place: Place, node: Node) -> None:
    refused: list[str] = []

    def alter() -> None:
        for statement in (
            "ALTER TABLE log RENAME TO mine",
            "ALTER TABLE log DISABLE TRIGGER refuse",
            "CREATE RULE keep AS ON DELETE TO log DO INSTEAD NOTHING",
            "DROP TABLE log",
        ):
            with pytest.raises(psycopg.errors.LockNotAvailable):
                execute(node.dsn, f"SET lock_timeout = 100; {statement}")
            refused.append(statement)

    load(place, at(RestoreCrashPoint.LOADING, alter, SHARDS))
    assert len(refused) == 4
    assert_filled(place)


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("ALTER TABLE log ENABLE ALWAYS TRIGGER refuse", 'trigger refuse of public.log'),
        ("CREATE RULE keep AS ON DELETE TO log DO INSTEAD NOTHING; ALTER TABLE log ENABLE REPLICA RULE keep",
         "rule keep of public.log"),
        ("ALTER TABLE log ALTER what TYPE varchar", "public.log.what is character varying instead of text"),
    ],
)  # fmt: skip
def test_what_is_altered_before_they_are_locked_is_found(place: Place, node: Node, statement: str, said: str) -> None:
    with pytest.raises(TablesUnfitError, match=said):
        load(place, at(RestoreCrashPoint.INTENT_STORED, lambda: execute(node.dsn, statement)))
    assert rows_of(node.dsn) == {"public.log": b"", "public.item": b""}


def test_a_row_that_is_being_deleted_at_the_other_end_of_a_key_is_waited_for(place: Place, node: Node) -> None:
    """While the table that refers to it is empty, nothing forbids it."""
    with psycopg.connect(node.dsn) as other:
        committing = threading.Timer(COMMIT_AFTER_SECONDS, other.commit)

        def then(reached: Reached) -> None:
            if (reached.point, reached.count) == (str(RestoreCrashPoint.LOADING), SHARDS):
                other.execute("DELETE FROM kind WHERE id = 1")
            if reached.point == str(RestoreCrashPoint.ROWS_LOADED):
                committing.start()

        with pytest.raises(ForeignKeyViolatedError, match=r"\(n\) = \(1\) refers to none of public.kind"):
            load(place, Watching(then))
        committing.join()
    execute(node.dsn, "INSERT INTO kind VALUES (1)")
    assert_empty(place)


def test_a_transaction_that_does_not_end_is_named(place: Place, node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("restore.data_only.held_tables.LOCK_SECONDS_MAX", 1)
    with psycopg.connect(node.dsn) as other:
        pid = other.info.backend_pid
        with pytest.raises(TablesInUseError, match=f"node s2: .*sessions {pid} have written to them"):
            load(
                place,
                at(RestoreCrashPoint.LOADING, lambda: other.execute("UPDATE kind SET id = 1 WHERE id = 1"), SHARDS),
            )
        other.rollback()
    assert_empty(place)


def test_rows_that_refer_to_loaded_ones_keep_these_from_being_deleted(place: Place, node: Node) -> None:
    """`tag` is not restored; its key counts as valid, and stays so."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(node.dsn, "INSERT INTO tag SELECT max(id) FROM item")
    with pytest.raises(TablesChangedError, match=r"node s2: .*a row of public.tag refers to one of public.item"):
        abandon(place)
    assert rows_of(node.dsn)["public.item"]
    execute(node.dsn, "DELETE FROM tag")
    abandon(place)
    assert_empty(place)


def test_a_table_of_another_name_is_neither_emptied_nor_filled(place: Place, node: Node) -> None:
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        node.dsn,
        "SET session_replication_role = replica; ALTER TABLE log RENAME TO mine;"
        " CREATE TABLE log (what text); INSERT INTO mine VALUES ('my own row')",
    )
    with pytest.raises(TablesUnfitError, match="are not those that the restore has begun to fill"):
        resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), Silent())
    with pytest.raises(TablesChangedError, match=r'table public.mine was "public"."log" when it was filled'):
        abandon(place)
    with psycopg.connect(node.dsn) as connection:
        assert connection.execute("SELECT count(*) FROM mine WHERE what = 'my own row'").fetchone() == (1,)
        assert connection.execute("SELECT count(*) FROM log").fetchone() == (0,)
    execute(node.dsn, "DROP TABLE log", "ALTER TABLE mine RENAME TO log")
    abandon(place)
    assert_empty(place)


def test_a_rule_that_would_keep_rows_is_named_when_they_are_to_be_deleted(place: Place, node: Node) -> None:
    """`item` is deleted from, because `tag` refers to it."""
    leave(place, RestoreCrashPoint.ROWS_LOADED, 1)
    execute(
        node.dsn,
        "CREATE RULE keep AS ON DELETE TO item DO INSTEAD NOTHING",
        "ALTER TABLE item ENABLE ALWAYS RULE keep",
    )
    with pytest.raises(TablesChangedError, match=r"rule keep of public\.item would act"):
        abandon(place)
    assert rows_of(node.dsn)["public.item"]
    execute(node.dsn, "DROP RULE keep ON item")
    abandon(place)
    assert_empty(place)
