"""How sessions on nodes begin: what a server that refuses one is asked, and what client programs get over a socket."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from psycopg.conninfo import make_conninfo

from fleet.config import Fleet
from fleet.nodes.connections import NodeUnreachableError, database_name
from fleet.nodes.problems import NodeUnfitError
from fleet.nodes.sessions import open_sessions
from fleet.programs.wheel import wheel_bin_directory
from snapshots.ddl.dump import dump_archive
from tests.commands.snapshot_runs import configure_fleet
from tests.integration.conftest import FleetFactory
from tests.integration.refusing import execute


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
