"""The statements of docs/roles.md, and servers of two versions with a database as the page describes it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet, load_fleet
from tests.commands.snapshot_runs import dropping_slots
from tests.integration.refusing import execute
from tests.run.quick_spark import with_spark
from tests.servers.fleets import fleet_of
from tests.servers.installed import SERVERS

PAGE = Path(__file__).parent.parent.parent / "docs" / "roles.md"
BLOCK = re.compile(r"^```sql (?P<name>[a-z-]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
DATABASE, ADMIN, OWNER, BACKUP, RESTORER = "shop", "shop_admin", "shop_owner", "backup", "restorer"
STANDBY_SNAPSHOT, STANDBY_SNAPSHOT_VERSION = "pg_log_standby_snapshot", 160000
WAIT_SECONDS_MAX = 30
# Nobody may do anything that is not granted. There are partitions, a table with policies for its owner too, and one
# that is excluded and has another owner.
SCHEMA = (
    f"REVOKE ALL ON DATABASE {DATABASE} FROM PUBLIC",
    f"CREATE SCHEMA app AUTHORIZATION {OWNER}",
    f"GRANT CREATE ON SCHEMA public TO {OWNER}",
    f"GRANT CREATE ON DATABASE {DATABASE} TO {OWNER}; GRANT ALL ON SCHEMA app TO {ADMIN}",
    f"SET ROLE {ADMIN}; CREATE TABLE app.audit (id int)",
    f"SET ROLE {OWNER}",
    "CREATE TABLE app.paid (id serial PRIMARY KEY, amount numeric CHECK (amount >= 0))",
    "INSERT INTO app.paid (amount) SELECT n FROM generate_series(1, 50) AS n",
    "CREATE TABLE app.secret (id int PRIMARY KEY, whose name)",
    "INSERT INTO app.secret VALUES (1, 'a'), (2, 'b')",
    "ALTER TABLE app.secret ENABLE ROW LEVEL SECURITY",
    "CREATE POLICY own ON app.secret USING (whose = CURRENT_USER)",
    "ALTER TABLE app.secret FORCE ROW LEVEL SECURITY",
    "CREATE TABLE app.parts (id int PRIMARY KEY) PARTITION BY RANGE (id)",
    "CREATE TABLE app.part PARTITION OF app.parts FOR VALUES FROM (0) TO (9)",
    "CREATE TABLE public.common (id int PRIMARY KEY)",
    "CREATE MATERIALIZED VIEW app.total AS SELECT sum(amount) FROM app.paid",
    "CREATE STATISTICS app.both ON id, amount FROM app.paid",
    "CREATE PUBLICATION others FOR TABLE app.paid",
    f"GRANT SELECT ON app.paid TO {ADMIN} WITH GRANT OPTION",
    f"SET ROLE {ADMIN}; GRANT SELECT ON app.paid TO pg_monitor; SET ROLE {OWNER}",
    f"ALTER DEFAULT PRIVILEGES IN SCHEMA app GRANT SELECT ON TABLES TO {ADMIN}",
    # What an owner revokes from itself.
    f"REVOKE INSERT ON app.secret FROM {OWNER}",
    f"REVOKE UPDATE ON SEQUENCE app.paid_id_seq FROM {OWNER}",
    f"REVOKE REFERENCES ON app.paid FROM {OWNER}",
    f"RESET ROLE; REVOKE CREATE ON DATABASE {DATABASE} FROM {OWNER}",
)


def statements(*names: str) -> list[str]:
    """The statements of the page's blocks of these names, in order, each once."""
    blocks = {found["name"]: found["body"].splitlines() for found in BLOCK.finditer(PAGE.read_text())}
    return list(dict.fromkeys(line for name in names for line in blocks[name]))


def runs_on(statement: str, dsn: str) -> bool:
    """Whether the server has what the statement names."""
    with psycopg.connect(dsn) as connection:
        return STANDBY_SNAPSHOT not in statement or connection.info.server_version >= STANDBY_SNAPSHOT_VERSION


def grant(dsns: Iterable[str], granted: Iterable[str]) -> None:
    """Run the statements on these primaries, as a superuser."""
    chosen = list(granted)
    for dsn in dsns:
        execute(dsn, *(one for one in chosen if runs_on(one, dsn)))


def as_role(fleet: Fleet, role: str, folder: Path) -> Fleet:
    """The fleet with another role in each dsn and a store in the folder, also in the file that commands read."""
    text = re.sub(r"user=\S+", f"user={role}", fleet.path.read_text())
    path = folder / "fleet.toml"
    path.write_text(re.sub(r"(?m)^store = .*$", f"store = {json.dumps(f'file://{folder}/store')}", text))
    return load_fleet(path)


def restored(fleet: Fleet, role: str, name: str = f"{DATABASE}_back") -> Fleet:
    """The fleet's primaries as targets: other databases on the same servers, restored by another role."""
    dsns = (make_conninfo(node.dsn, user=role, dbname=name) for node in fleet.primaries)
    nodes = tuple(replace(node, dsn=dsn) for node, dsn in zip(fleet.primaries, dsns, strict=True))
    return replace(fleet, nodes=nodes)


def await_standbys(fleet: Fleet) -> None:
    """Wait until every standby has replayed what its primary has written."""
    for node in fleet.nodes:
        if node.backup_of:
            with (
                psycopg.connect(fleet.node(node.backup_of).dsn) as primary,
                psycopg.connect(make_conninfo(node.dsn, dbname="postgres"), autocommit=True) as standby,
            ):
                written = primary.execute("SELECT pg_current_wal_lsn()").fetchone()
                deadline = time.monotonic() + WAIT_SECONDS_MAX
                while standby.execute("SELECT pg_last_wal_replay_lsn() >= %s", written).fetchone() != (True,):
                    assert time.monotonic() < deadline
                    time.sleep(0.02)


@contextmanager
def two_versions(directory: Path) -> Iterator[EmbeddedFleet]:
    """A shard of the wheel's version and, where there is one, a shard of PostgreSQL 15; each with a standby."""
    older = [SERVERS[15]] if 15 in SERVERS else []
    with fleet_of(directory, [None, *older], backups=1, schema=False) as fleet:
        yield fleet


@contextmanager
def shop_on(embedded: EmbeddedFleet, folder: Path) -> Iterator[Fleet]:
    """The database on every primary, as a fleet whose dsns are a superuser's; at the end all of it is dropped."""
    lines = ['name = "shop"', f"store = {json.dumps(f'file://{folder}/store')}", "[groups]", 'exclude = ["app.audit"]']
    for node in embedded.nodes:
        lines += ["[[node]]", f'id = "{node.id}"', *([f'backup_of = "{node.backup_of}"'] if node.backup_of else [])]
        lines += [f"dsn = {json.dumps(make_conninfo(node.dsn('postgres'), dbname=DATABASE) + ' ')}"]
    (folder / "fleet.toml").write_text("\n".join([*lines, with_spark("")]) + "\n")
    fleet = load_fleet(folder / "fleet.toml")
    for node in embedded.primaries:
        execute(node.dsn("postgres"), f"CREATE ROLE {OWNER}", f"CREATE ROLE {ADMIN}")
        execute(node.dsn("postgres"), f"CREATE DATABASE {DATABASE} OWNER {ADMIN}")
    try:
        for primary in fleet.primaries:
            execute(primary.dsn, *SCHEMA)
        await_standbys(fleet)
        with dropping_slots(fleet):
            yield fleet
    finally:
        for node in embedded.primaries:
            drop_everything(node)


def drop_databases(dsn: str, prefix: str) -> None:
    """Drop all databases whose name has the prefix."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        found = admin.execute("SELECT datname FROM pg_database WHERE datname ^@ %s", (prefix,)).fetchall()
        for (name,) in found:
            admin.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def drop_everything(server: EmbeddedNode) -> None:
    """Drop all databases that a test made, and all roles."""
    drop_databases(server.dsn("postgres"), DATABASE)
    with psycopg.connect(server.dsn("postgres"), autocommit=True) as admin:
        for (name,) in admin.execute("SELECT rolname FROM pg_roles WHERE oid >= 16384").fetchall():
            drop_role(server.dsn("postgres"), name)


def drop_role(dsn: str, *roles: str) -> None:
    """Drop the roles with all that they own or were granted in this database."""
    with psycopg.connect(dsn, autocommit=True) as admin:
        for role in roles:
            if admin.execute("SELECT FROM pg_roles WHERE rolname = %s", (role,)).fetchone() is not None:
                name = sql.Identifier(role)
                admin.execute(sql.SQL("DROP OWNED BY {} CASCADE; DROP ROLE {}").format(name, name))


def forget(fleet: Fleet, *roles: str) -> None:
    """Drop the restored databases, the roles and Cutline's publications on all primaries."""
    for primary in fleet.primaries:
        drop_databases(primary.dsn, f"{DATABASE}_")
        with psycopg.connect(primary.dsn, autocommit=True) as admin:
            for (name,) in admin.execute("SELECT pubname FROM pg_publication WHERE pubname ^@ 'cutline_'").fetchall():
                admin.execute(f'DROP PUBLICATION "{name}"'.encode())
        drop_role(primary.dsn, *roles)
