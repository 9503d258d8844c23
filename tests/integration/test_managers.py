"""`init` recognises what manages a server by the marks that it leaves: settings, slots, and names of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.nodes.managers import MARKS
from cutline.nodes.sessions import open_sessions
from cutline.nodes.surroundings import find_warnings, read_surroundings
from tests.commands.in_process import run_here
from tests.integration.own_database import own_database

NAMES = [name for name, _ in MARKS]
# What makes each mark: settings of the database, physical slots, names of sessions.
SETTINGS = {
    "cloudnative-pg": [("cnpg.config_sha256", "0a1b")],
    "pg-failover-slots": [("pg_failover_slots.synchronize_slot_names", "name_like:%")],
    "amazon-rds": [("rds.logical_replication", "on")],
    "cloud-sql": [("cloudsql.logical_decoding", "on"), ("alloydb.logical_decoding", "on")],
    # Empty, which is Azure's default.
    "azure": [("azure.extensions", "")],
}
SLOTS = {
    "cloudnative-pg": ["_cnpg_s1_2"],
    "repmgr": ["repmgr_slot_2"],
    "stolon": ["stolon_1b2c3d"],
    "pg-auto-failover": ["pgautofailover_standby_2"],
}
SESSIONS = {"patroni": ["Patroni heartbeat", "Patroni restapi"], "repmgr": ["repmgr"]}
CASES = [
    *((name, "setting", one) for name, found in SETTINGS.items() for one in found),
    *((name, "slot", one) for name, found in SLOTS.items() for one in found),
    *((name, "session", one) for name, found in SESSIONS.items() for one in found),
]


@pytest.fixture
def fleet(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    with own_database(shared_fleet, tmp_path, "managed") as found:
        yield found


def warned(fleet: Fleet) -> list[str]:
    """The names of the managers that are found on the fleet's node."""
    with open_sessions(fleet, fleet.nodes) as sessions:
        return [one.name for one in find_warnings(fleet, read_surroundings(sessions)) if one.name in NAMES]


def test_every_manager_has_a_case() -> None:
    assert {name for name, _, _ in CASES} == set(NAMES)


@pytest.mark.parametrize(("name", "kind", "mark"), CASES, ids=[f"{name}-{kind}" for name, kind, _ in CASES])
def test_each_is_recognised_by_each_of_its_marks(
    fleet: Fleet, name: str, kind: str, mark: str | tuple[str, str]
) -> None:
    dsn = fleet.nodes[0].dsn
    assert warned(fleet) == []
    with psycopg.connect(dsn, autocommit=True) as connection, ExitStack() as stack:
        if kind == "setting":
            key, value = mark
            connection.execute(f"ALTER DATABASE managed SET {key} = '{value}'".encode())
        elif kind == "slot":
            connection.execute("SELECT pg_create_physical_replication_slot(%s)", [mark])
            stack.callback(connection.execute, "SELECT pg_drop_replication_slot(%s)", [mark])
        else:
            stack.enter_context(psycopg.connect(dsn, application_name=str(mark)))
        assert warned(fleet) == [name]


def test_an_extension_that_copies_no_slots_is_no_danger(fleet: Fleet) -> None:
    with psycopg.connect(fleet.nodes[0].dsn, autocommit=True) as connection:
        connection.execute("ALTER DATABASE managed SET pg_failover_slots.synchronize_slot_names = ''")
    assert warned(fleet) == []


def test_a_limit_below_the_size_of_the_servers_wal_files_is_named(fleet: Fleet) -> None:
    with psycopg.connect(fleet.nodes[0].dsn) as connection:
        assert connection.execute("SHOW wal_segment_size").fetchone() == ("16MB",)

    def found(limit_bytes: int) -> list[str]:
        limited = replace(fleet, nodes=(replace(fleet.nodes[0], retained_wal_bytes_max=limit_bytes),))
        with open_sessions(limited, limited.nodes) as sessions:
            warnings = find_warnings(limited, read_surroundings(sessions))
        return [one.text for one in warnings if one.name == "wal-segment-size"]

    assert found(16 << 20) == []
    (text,) = found((16 << 20) - 1)
    assert "wal_segment_size is 16.0 MiB, more than max_retained_wal" in text
    assert "at least 16MiB" in text


def test_init_says_what_to_set(fleet: Fleet) -> None:
    with psycopg.connect(fleet.nodes[0].dsn, autocommit=True) as connection:
        connection.execute("ALTER DATABASE managed SET rds.logical_replication = 'on'")
    code, document = run_here(fleet, "init")
    assert code == 0
    (found,) = [one for one in document["surroundings"] if one["warning"] in NAMES]
    assert found["warning"] == "amazon-rds"
    assert "rds.logical_replication = 1" in found["action"]
