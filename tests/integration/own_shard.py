"""A separate database on the first shard of a running fleet, described as a fleet of that shard alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, load_fleet
from tests.integration.wal_place import await_database
from tests.run.quick_spark import with_spark


@contextmanager
def database_on(
    embedded: EmbeddedFleet, name: str, folder: Path, *, user: str = "postgres", more: str = "", options: str = ""
) -> Iterator[Fleet]:
    """Create the database, its fleet.toml and store in `folder`; at the end, drop all databases with prefix `name`.

    `options` are those of CREATE DATABASE.
    """
    primary = embedded.primaries[0]
    nodes = (primary, *embedded.backups_of(primary))
    lines = ['name = "own"', f"store = {json.dumps(f'file://{folder}/store')}"]
    for node in nodes:
        lines += ["", "[[node]]", f'id = "{node.id}"', *([f'backup_of = "{node.backup_of}"'] if node.backup_of else [])]
        lines += [f"dsn = {json.dumps(make_conninfo(node.dsn('postgres'), dbname=name, user=user))}"]
    (folder / "fleet.toml").write_text("\n".join([*lines, with_spark(more)]) + "\n")
    with psycopg.connect(primary.dsn("postgres"), autocommit=True) as admin:
        admin.execute(f"CREATE DATABASE {name} {options}".encode())
        try:
            fleet = load_fleet(folder / "fleet.toml")
            for node in fleet.nodes:
                await_database(node)
            yield fleet
        finally:
            found = admin.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (name,)).fetchall()
            for (database,) in found:
                roll_back_prepared(make_conninfo(primary.dsn("postgres"), dbname=database))
                admin.execute(f'DROP DATABASE "{database}" WITH (FORCE)'.encode())


def roll_back_prepared(dsn: str) -> None:
    """Roll back the database's prepared transactions: PostgreSQL does not drop a database that has any."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        query = "SELECT quote_literal(gid) FROM pg_prepared_xacts WHERE database = current_database()"
        for (gid,) in connection.execute(query).fetchall():
            connection.execute(f"ROLLBACK PREPARED {gid}".encode())
