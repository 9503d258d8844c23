"""How sessions on nodes begin: what a server that refuses one is asked, and what client programs get over a socket."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode, stop_server
from cutline.fleet.config import Fleet, KnownServer, Node, load_fleet
from cutline.nodes.baseline import find_node
from cutline.nodes.connections import (
    NodeUnreachableError,
    OtherServerError,
    as_connected,
    connect,
    connect_replication,
    database_name,
)
from cutline.nodes.problems import NodeUnfitError, find_decoding_problems, read_role
from cutline.nodes.programs import wheel_bin_directory
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.ddl.dump import dump_archive
from cutline.snapshots.records.commit import Increment
from cutline.storage.errors import UsageError
from cutline.wal.drain.peek import open_reader
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots, slots_of
from tests.integration.conftest import FleetFactory
from tests.integration.refusing import execute
from tests.servers.dealt import standbys_decode

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def with_options(fleet: Fleet, **options: str) -> Fleet:
    return replace(fleet, nodes=tuple(replace(one, dsn=make_conninfo(one.dsn, **options)) for one in fleet.nodes))


def test_a_server_is_asked_again_only_if_it_refuses_the_database(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    servers = fleet_factory(1)
    (server,) = servers.primaries
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    database = database_name(fleet.nodes[0].dsn)
    execute(fleet.nodes[0].dsn, "ALTER SYSTEM SET log_line_prefix = '%d: '", "SELECT pg_reload_conf()")
    absent = with_options(fleet, user="absent")
    with pytest.raises(NodeUnreachableError, match='role "absent" does not exist'), open_sessions(absent, absent.nodes):
        pass
    # The session and the watch of the node connect to its database; nothing asks in another one.
    assert f'{database}: FATAL:  role "absent" does not exist' in server.log_file.read_text()
    assert 'postgres: FATAL:  role "absent" does not exist' not in server.log_file.read_text()
    execute(fleet.nodes[0].dsn, "CREATE ROLE backup LOGIN", f'REVOKE CONNECT ON DATABASE "{database}" FROM PUBLIC')
    ours = with_options(fleet, user="backup")
    with pytest.raises(NodeUnfitError) as raised, open_sessions(ours, ours.nodes):
        pass
    assert f'GRANT CONNECT ON DATABASE "{database}" TO "backup";' in raised.value.hint
    execute(fleet.nodes[0].dsn, f'GRANT CONNECT ON DATABASE "{database}" TO backup')
    with pytest.raises(NodeUnfitError) as raised, open_sessions(ours, ours.nodes, unfit_hint="as told") as sessions:
        sessions.connections[ours.nodes[0].id].execute("SELECT pg_read_file('PG_VERSION')")
    assert raised.value.hint == "as told"


def test_programs_without_tls_work_over_a_socket_whatever_the_mode(fleet_factory: FleetFactory, tmp_path: Path) -> None:
    servers = fleet_factory(1)
    fleet = configure_fleet(servers, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    strict = with_options(fleet, sslmode="verify-full", sslrootcert="system")
    (node,) = (replace(one, programs=wheel_bin_directory()) for one in strict.nodes)
    with open_sessions(strict, [node]) as sessions:
        assert dump_archive(node, None, sessions.watch)


def test_a_session_that_comes_to_another_server_is_refused_as_if_its_node_were_away(
    shared_fleet: EmbeddedFleet,
) -> None:
    """A dsn may lead to several servers, and a slot or an exported snapshot is on one of them."""
    first, second = shared_fleet.primaries
    (standby,) = shared_fleet.backups_of(first)
    node = Node("s1", first.dsn())
    with connect(node) as connection:
        found = find_node(node, connection).identity
    known = replace(node, server=KnownServer(found.system_identifier, found.in_recovery))
    for open_session in (connect, connect_replication):
        open_session(known).close()
        with pytest.raises(OtherServerError, match="node s1: its dsn connects to more than one server: the") as raised:
            open_session(replace(known, dsn=second.dsn()))
        assert raised.value.exit_code == 6
        assert "target_session_attrs=primary" in raised.value.hint
        with pytest.raises(OtherServerError, match="a session was on a standby"):
            open_session(replace(known, dsn=standby.dsn()))
    with pytest.raises(OtherServerError), open_reader(replace(known, dsn=second.dsn())):
        pass


def test_programs_connect_to_the_very_server_of_a_session(shared_fleet: EmbeddedFleet) -> None:
    """pg_dump reads in a snapshot that only this one has, whatever other hosts the dsn names."""
    first, second = shared_fleet.primaries
    hosts = f"{first.socket.parent},{second.socket.parent}"
    node = Node("s1", make_conninfo(first.dsn(), host=hosts, load_balance_hosts="random"))
    with connect(node) as connection:
        here = conninfo_to_dict(as_connected(node, connection).dsn)
        assert here["host"] == connection.info.host in hosts.split(",")
    assert "load_balance_hosts" not in here


def test_a_service_that_asks_for_replication_is_refused(
    shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dsn with replication is refused when fleet.toml is read; what a service has, libpq alone knows."""
    file = tmp_path / "pg_service.conf"
    monkeypatch.setenv("PGSERVICEFILE", str(file))
    given = "".join(f"{name}={value}\n" for name, value in conninfo_to_dict(shared_fleet.primaries[0].dsn()).items())
    node = Node("s1", "service=shop")
    for value, is_refused in (("database", True), ("true", True), ("false", False)):
        file.write_text(f"[shop]\n{given}replication={value}\n")
        if is_refused:
            with pytest.raises(UsageError, match="node s1: its connection service sets replication"):
                connect(node)
        else:
            connect(node).close()
        connect_replication(node).close()


def test_sessions_are_of_the_role_of_the_dsn_whatever_role_it_acts_as_elsewhere(shared_fleet: EmbeddedFleet) -> None:
    """Its privileges are asked for, and granted to it; the dsn may name the other role itself."""
    dsn = shared_fleet.primaries[0].dsn()
    execute(dsn, "CREATE ROLE shop_owner", "CREATE ROLE ops LOGIN IN ROLE shop_owner")
    try:
        execute(dsn, "ALTER ROLE ops SET role = 'shop_owner'")
        node = Node("s1", make_conninfo(dsn, user="ops"))
        with psycopg.connect(node.dsn) as other, connect(node) as connection:
            assert other.execute("SELECT current_user").fetchone() == ("shop_owner",)
            assert read_role(node, connection).name == "ops"
            (problem,) = find_decoding_problems(node, read_role(node, connection))
            assert problem.remedy == 'ALTER ROLE "ops" REPLICATION;'
        with connect(replace(node, dsn=make_conninfo(node.dsn, options="-c role=shop_owner"))) as connection:
            assert read_role(node, connection).name == "shop_owner"
    finally:
        execute(dsn, "DROP ROLE ops", "DROP ROLE shop_owner")


@pytest.mark.postgresql(18, reason="15 and 16 have no login triggers")
def test_what_a_login_trigger_sets_does_not_stay(fleet_factory: FleetFactory) -> None:
    (server,) = fleet_factory(1).primaries
    execute(
        server.dsn(),
        "CREATE FUNCTION public.greet() RETURNS event_trigger LANGUAGE plpgsql AS"
        " $$ BEGIN PERFORM set_config('datestyle', 'German', false), set_config('array_nulls', 'off', false); END $$",
        "CREATE EVENT TRIGGER greet ON login EXECUTE FUNCTION public.greet()",
    )
    with connect(Node("s1", server.dsn())) as connection:
        assert connection.execute("SHOW datestyle").fetchone() == ("ISO, YMD",)
        assert connection.execute("SHOW array_nulls").fetchone() == ("on",)


def test_after_a_switchover_a_dsn_of_both_hosts_leads_to_the_new_primary(
    fleet_factory: FleetFactory, spark: SparkSession, tmp_path: Path
) -> None:
    servers = fleet_factory(1, 1)
    ((first,), (second,)) = servers.primaries, servers.backups_of(servers.primaries[0])
    path = tmp_path / "fleet.toml"
    configure_fleet(servers, path, f"file://{tmp_path}/store")
    hosts = f"{first.socket.parent},{second.socket.parent}"
    path.write_text(re.sub(r"dsn = .*", f'dsn = "host={hosts} user=postgres dbname=bank"', path.read_text()))
    fleet = load_fleet(path)
    runs = Runs(fleet, Ready(spark))
    with dropping_slots(fleet):
        runs.init()
        runs.full("before")
        stop_server(first)
        execute(second.dsn(), "SELECT pg_promote()")
        follow(first, second)
        servers.start_node(first)
        # The chain goes on, or copies the shard again if its new primary has no slot of the chain.
        commit = runs.increment("before")
        assert isinstance(commit, Increment)
        assert commit.timelines.get("s1") == 2 or commit.renewed["s1"].identity.timeline == 2
        assert not runs.check_one("before").conflicts
        runs.full("after")
        report = runs.check_one("after")
        skipped = [one.what for one in report.skipped]
        assert (report.result, skipped) == (
            ("valid", []) if standbys_decode() else ("inconclusive", ["rows of shard s1"])
        )
        assert {slot for slot in slots_of(second.dsn()) if slot in slots_of(first.dsn())}


def follow(node: EmbeddedNode, primary: EmbeddedNode) -> None:
    """Let a primary that was shut down be a standby of its former standby."""
    (node.data_directory / "standby.signal").touch()
    with (node.data_directory / "postgresql.auto.conf").open("a") as file:
        file.write(f"primary_conninfo = 'host={primary.folder} user=postgres'\n")
