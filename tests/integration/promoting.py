"""Shards whose servers change their roles: promotions, and old primaries that come back as standbys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg

from cutline.embedded.fleet import stop_fleet
from cutline.embedded.server import stop_server
from tests.commands.changing_fleet import ChangingFleet
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.servers.dealt import start_fleet

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PRIMARY, STANDBY = "s1", "s1-b1"


@contextmanager
def fleet_with_chain(
    folder: Path, spark: SparkSession, shards: int, backups: int, settings: Mapping[str, str] | None = None
) -> Iterator[ChangingFleet]:
    """Run a fleet of its own with the full snapshot `chain`, and one to restore into, in `folder`."""
    try:
        source = start_fleet(folder / "fleet", shards=shards, backups=backups, settings=settings)
        target = start_fleet(folder / "target", shards=shards, backups=0, like_shared=True)
        fleet = configure_fleet(source, folder / "fleet.toml", f"file://{folder}/store")
        into = configure_fleet(target, folder / "target.toml", f"file://{folder}/other-store")
        found = ChangingFleet(source, into, Runs(fleet, Ready(spark)), folder)
        for primary in fleet.primaries:
            found.execute(
                primary.id,
                "CREATE TABLE seen (id int PRIMARY KEY, text text NOT NULL)",
                "INSERT INTO seen SELECT n, 'text ' || n FROM generate_series(1, 50) n",
            )
        for node in fleet.nodes:
            if node.backup_of:
                found.await_replay(node.id)
        found.runs.init()
        found.runs.full("chain")
        yield found
    finally:
        stop_fleet(folder / "fleet", delete=True)
        stop_fleet(folder / "target", delete=True)


def promote(place: ChangingFleet, node: str) -> None:
    """Promote the standby of s1 on `node`, and wait until it accepts writes."""
    place.execute(node, "SELECT pg_promote(true, 60)")
    place.promoted[PRIMARY] = node


def prepare(place: ChangingFleet, gid: str) -> None:
    """Leave a prepared transaction with a row of s1."""
    with psycopg.connect(place.fleet.node(place.live[0]).dsn, autocommit=True) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO seen VALUES (9001, 'prepared')")
        connection.execute(f"PREPARE TRANSACTION '{gid}'".encode())


def take_replayed_increment(place: ChangingFleet) -> None:
    """Take an increment of all that was written, which the standby has replayed before and after it."""
    place.write()
    place.await_replay(STANDBY)
    place.increment()
    place.await_replay(STANDBY)


def follow(place: ChangingFleet, node: str, primary: str) -> None:
    """Start a server that was shut down as a standby of the promoted server."""
    server, leader = place.servers.node(node), place.servers.node(primary)
    with (server.data_directory / "postgresql.auto.conf").open("a") as settings:
        settings.write(
            f"primary_conninfo = 'host={leader.socket_folder} port=5432 user=postgres application_name={node}'\n"
            "primary_slot_name = ''\n"
        )
    (server.data_directory / "standby.signal").touch()
    place.start(node)


def become_standby(place: ChangingFleet, node: str) -> None:
    """Start a server that was stopped as a standby that follows nobody."""
    server = place.servers.node(node)
    with (server.data_directory / "postgresql.auto.conf").open("a") as settings:
        settings.write("primary_conninfo = ''\nprimary_slot_name = ''\n")
    (server.data_directory / "standby.signal").touch()
    place.servers.start_node(server)


def switch_over(place: ChangingFleet, old: str, new: str) -> None:
    """Shut the primary down, promote its standby, and let the old primary follow, up to what is written then."""
    stop_server(place.servers.node(old))
    promote(place, new)
    follow(place, old, new)
    place.write()
    place.await_replay(old)
