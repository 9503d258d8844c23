"""Privileges that are taken away later, and rows and options that PostgreSQL hides from a role.

A role from which row-level security hides rows is refused by name, so that no snapshot lacks rows. test_roles.py runs
every command as the role of docs/roles.md.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import cutline.nodes.preconditions as preconditions
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.groups import read_tables
from cutline.nodes.left_out import LeftOutKind, read_left_out
from cutline.nodes.problems import NodeUnfitError
from cutline.snapshots.create.initialise import initialise
from cutline.storage.errors import SnapshotError
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.documented_roles import await_standbys
from tests.integration.own_database import own_database
from tests.integration.own_shard import database_on
from tests.integration.refusing import create, execute, refused, take_increment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutline.embedded.fleet import EmbeddedFleet

NAME = "nightly"
ROLE = "role_backup"
SCHEMA = (
    "CREATE ROLE role_owner",
    "CREATE ROLE role_reader",
    "CREATE SCHEMA app AUTHORIZATION role_owner",
    "SET ROLE role_owner; CREATE TABLE app.paid (id serial PRIMARY KEY, amount numeric);"
    " INSERT INTO app.paid (amount) SELECT n FROM generate_series(1, 50) AS n;"
    " CREATE VIEW app.total AS SELECT sum(amount) FROM app.paid; GRANT SELECT ON app.paid TO role_reader;"
    " CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN new; END $$;"
    " CREATE TRIGGER note BEFORE INSERT ON app.paid FOR EACH ROW EXECUTE FUNCTION app.note();"
    " CREATE TABLE app.secret (id int PRIMARY KEY, whose name); INSERT INTO app.secret VALUES (1, 'a'), (2, 'b');"
    " ALTER TABLE app.secret ENABLE ROW LEVEL SECURITY;"
    " CREATE POLICY own ON app.secret USING (whose = CURRENT_USER); RESET ROLE",
)
# docs/roles.md, without what concerns standbys and policies.
PRIVILEGES = (
    f"CREATE ROLE {ROLE} LOGIN REPLICATION",
    f"GRANT pg_read_all_data, pg_monitor TO {ROLE}",
    f"GRANT CREATE ON DATABASE role TO {ROLE}",
)
TO_PUBLISH = f"GRANT role_owner TO {ROLE}"
HIDDEN = f"node s1: row-level security hides rows of app.secret from role {ROLE}"


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    """The database, as a fleet whose dsn is a superuser's. The roles are dropped at the end, too."""
    with own_database(shared_fleet, tmp_path, "role") as found:
        execute(found.nodes[0].dsn, *SCHEMA, *PRIVILEGES)
        yield found
    server = with_database(found.nodes[0], "postgres").dsn
    execute(server, *(f"DROP OWNED BY {role}; DROP ROLE {role}" for role in ("role_reader", ROLE, "role_owner")))


def as_role(fleet: Fleet) -> Fleet:
    return replace(fleet, nodes=tuple(replace(node, dsn=make_conninfo(node.dsn, user=ROLE)) for node in fleet.nodes))


def test_the_grant_for_slots_on_standbys_is_asked_for_and_suffices(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = shared_fleet.primaries[0].dsn("postgres")
    try:
        with database_on(shared_fleet, "role", tmp_path) as fleet, dropping_slots(fleet):
            source = fleet.primaries[0].dsn
            execute(source, *PRIVILEGES, f"SET ROLE {ROLE}; CREATE SCHEMA own; CREATE TABLE own.t (id int PRIMARY KEY)")
            runs = Runs(as_role(fleet), Ready(spark))
            await_standbys(fleet)
            with pytest.raises(NodeUnfitError, match=r"can't call pg_log_standby_snapshot\(\)") as raised:
                runs.init()
            with psycopg.connect(source) as writer:
                writer.execute("SELECT pg_current_xact_id()")
                # Somebody took the privilege away after init.
                with monkeypatch.context() as patch:
                    patch.setattr(preconditions, "STANDBY_FUNCTIONS", ())
                    runs.init()
                    with pytest.raises(NodeUnfitError) as later:
                        runs.full(NAME)
                assert later.value.hint.splitlines()[-1] in raised.value.hint.splitlines()
                execute(source, "\n".join(line for line in raised.value.hint.splitlines() if line[0] != "\\"))
                threading.Timer(1.0, writer.commit).start()
                runs.init()
                runs.full("again")
            assert sorted_copies(source) == {"own.t": b""}
    finally:
        execute(server, f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")


def test_user_mappings_whose_options_are_hidden_from_the_role_are_named(fleet: Fleet) -> None:
    (source,) = (node.dsn for node in fleet.nodes)
    mapping = "CREATE USER MAPPING FOR role_reader SERVER hidden OPTIONS (password 'p')"
    execute(source, "CREATE FOREIGN DATA WRAPPER nothing", "CREATE SERVER hidden FOREIGN DATA WRAPPER nothing", mapping)
    expected = [(LeftOutKind.USER_MAPPING, "role_reader on server hidden")]
    for reader, named in ((as_role(fleet), expected), (fleet, [])):
        with connect(reader.nodes[0]) as connection:
            found = read_left_out({"s1": connection}, reader.groups, {})
        assert [(one.kind, one.name) for one in found if one.kind == LeftOutKind.USER_MAPPING] == named


def test_a_role_that_can_not_see_every_row_is_refused_by_name(fleet: Fleet, spark: SparkSession) -> None:
    (source,) = (node.dsn for node in fleet.nodes)
    ours = as_role(fleet)
    with pytest.raises(SnapshotError) as raised:
        initialise(ours, Silent())
    assert raised.value.slug == "node-unfit"
    assert HIDDEN in raised.value.message
    initialise(fleet, Silent())
    with refused(ours, "node-unfit") as errors:
        create(ours, NAME)
    assert HIDDEN in errors[0].message
    assert f'ALTER ROLE "{ROLE}" BYPASSRLS;' in errors[0].hint.splitlines()
    # Owners see all rows unless row-level security is forced on them; BYPASSRLS sees all rows always.
    for change, hides in (
        (TO_PUBLISH, False), ("ALTER TABLE app.secret FORCE ROW LEVEL SECURITY", True),
        (f"ALTER ROLE {ROLE} BYPASSRLS", False), (f"ALTER ROLE {ROLE} NOBYPASSRLS", True),
        ("ALTER TABLE app.secret DISABLE ROW LEVEL SECURITY", False),
    ):  # fmt: skip
        execute(source, change)
        with connect(ours.nodes[0]) as connection:
            hidden = {t.group.name: t.hides_rows for t in read_tables(connection, ours.groups)}
            assert hidden == {"app.paid": False, "app.secret": hides}, change
            # If Cutline missed it, PostgreSQL would fail the copy instead of filtering its rows.
            if hides:
                with pytest.raises(Exception, match="affected by row-level security"):
                    connection.execute("SELECT * FROM app.secret")
    runs = Runs(ours, Ready(spark))
    runs.full(NAME)
    execute(source, "ALTER TABLE app.secret ENABLE ROW LEVEL SECURITY")
    with refused(ours, "node-unfit") as errors:
        take_increment(ours, NAME)
    assert HIDDEN in errors[0].message
