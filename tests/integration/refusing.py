"""What every refusal must do: give its name, exit code and a hint, start no Spark, and change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.storage.errors import SnapshotError
from tests.run.by_spark import archiving_by_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class NoSpark:
    """A SparkSource that must not be used: a refusal comes before Spark starts."""

    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        raise AssertionError("a refusal starts no Spark")

    def session(self) -> SparkSession:
        raise AssertionError("a refusal needs no Spark")


def execute(dsn: str, *statements: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.encode())


def create(fleet: Fleet, name: str) -> None:
    """Take a full snapshot that must be refused."""
    create_full(fleet, CreateRequest(name), NoSpark(), Silent())


def take_increment(fleet: Fleet, name: str) -> None:
    """Take an increment that must be refused before Spark starts, which little WAL would not need."""
    with archiving_by_spark():
        create_increment(fleet, CreateRequest(name), NoSpark(), Silent())


def publication_name(fleet: Fleet) -> str:
    """The name of the fleet's publication of keyed tables, derived from the store's id."""
    document = json.loads(fleet.store.open().read("fleet.json"))
    return f"cutline_{document['fleet']}"


def read_changeable(fleet: Fleet) -> dict[str, object]:
    """Everything that a command could change: the store's objects, and every node's slots, databases, publications."""
    store = fleet.store.open()
    found: dict[str, object] = {key: store.size(key) for key in store.list("")}
    query = """
        SELECT (SELECT array_agg(datname ORDER BY 1) FROM pg_database),
               (SELECT array_agg(pubname ORDER BY 1) FROM pg_publication),
               (SELECT count(*) FROM pg_publication_rel),
               (SELECT array_agg(slot_name || coalesce(confirmed_flush_lsn::text, '') ORDER BY 1)
                  FROM pg_replication_slots WHERE slot_type = 'logical')
        """
    for node in fleet.nodes:
        with psycopg.connect(node.dsn) as connection:
            found[node.id] = connection.execute(query).fetchone()
    return found


@contextmanager
def refused(fleet: Fleet, slug: str, code: int = 3) -> Iterator[list[SnapshotError]]:
    """Assert that the block ends with the refusal `slug` and changes nothing."""
    before = read_changeable(fleet)
    errors: list[SnapshotError] = []
    with pytest.raises(SnapshotError) as raised:
        yield errors
    errors.append(raised.value)
    assert (raised.value.slug, raised.value.exit_code) == (slug, code), raised.value.message
    assert raised.value.hint
    assert read_changeable(fleet) == before


@contextmanager
def changed(dsn: str, change: str, undo: str) -> Iterator[None]:
    """Change the database for the block, then undo the change."""
    execute(dsn, change)
    try:
        yield
    finally:
        execute(dsn, undo)
