"""A separate database for a test on the shared fleet's first primary: a fleet of one node with its own store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.connections import with_database
from tests.commands.snapshot_runs import configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.run.quick_spark import with_spark


@contextmanager
def own_database(embedded: EmbeddedFleet, directory: Path, name: str, more: str = "") -> Iterator[Fleet]:
    """Create the database and yield its fleet; at the end, drop its slots and all databases with the prefix `name`."""
    found = configure_fleet(embedded, directory / "fleet.toml", f"file://{directory}/store", more=more)
    server = found.primaries[0]
    node = with_database(server, name)
    # Commands in a subprocess read the file.
    lines = (directory / "fleet.toml").read_text().split("[[node]]")
    described_node = f'[[node]]\nid = "{node.id}"\ndsn = "{node.dsn}"\n'
    (directory / "fleet.toml").write_text(f"{lines[0]}{described_node}{with_spark(more)}\n")
    fleet = replace(found, nodes=(node,))
    execute(with_database(server, "postgres").dsn, f"CREATE DATABASE {name}")
    try:
        with dropping_slots(fleet):
            yield fleet
    finally:
        maintenance = with_database(server, "postgres").dsn
        with psycopg.connect(maintenance) as connection:
            found_names = connection.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (name,)).fetchall()
        for (database,) in found_names:
            execute(maintenance, f'DROP DATABASE "{database}" WITH (FORCE)')


def restore_target(fleet: Fleet) -> Fleet:
    """The same server, with another database to restore into."""
    (node,) = fleet.nodes
    name = node.dsn.split("dbname=")[-1].split()[0]
    return replace(fleet, nodes=(with_database(node, f"{name}_back"),))
