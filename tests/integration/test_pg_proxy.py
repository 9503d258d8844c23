"""The proxy between Cutline and a server behaves as its modes promise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import load_fleet
from tests.faults.pg_proxy import Mode, PgProxy, pg_proxies, route_through

STALL_SECONDS = 0.5
ROWS = 20_000


@pytest.fixture
def proxied(shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[tuple[PgProxy, str]]:
    fleet = load_fleet(shared_fleet.fleet_toml)
    with pg_proxies(shared_fleet) as proxies:
        through = route_through(proxies, fleet, tmp_path / "through.toml")
        assert {node.id for node in through.nodes} == proxies.keys()
        node = through.nodes[0]
        assert str(proxies[node.id].port) in node.dsn
        yield proxies[node.id], node.dsn


def rows(connection: psycopg.Connection[tuple[object, ...]]) -> int:
    return len(connection.execute(f"SELECT repeat('x', 1000) FROM generate_series(1, {ROWS})").fetchall())


def test_by_default_everything_passes(proxied: tuple[PgProxy, str]) -> None:
    proxy, dsn = proxied
    with psycopg.connect(dsn) as connection:
        assert rows(connection) == ROWS
        assert proxy.sessions == 1


@pytest.mark.parametrize("mode", [Mode.REFUSE, Mode.RESET])
def test_open_and_new_sessions_end_at_once(proxied: tuple[PgProxy, str], mode: Mode) -> None:
    proxy, dsn = proxied
    connection = psycopg.connect(dsn, autocommit=True)
    proxy.set(mode)
    began = time.monotonic()
    with pytest.raises(psycopg.OperationalError):
        connection.execute("SELECT 1")
    with pytest.raises(psycopg.OperationalError, match="refused" if mode is Mode.REFUSE else "reset|closed"):
        psycopg.connect(dsn)
    assert time.monotonic() - began < STALL_SECONDS * 4
    proxy.set(Mode.PASS)
    with psycopg.connect(dsn) as after:
        assert rows(after) == ROWS


def test_a_stall_holds_open_and_new_sessions_and_loses_nothing(proxied: tuple[PgProxy, str]) -> None:
    proxy, dsn = proxied
    with psycopg.connect(dsn, autocommit=True) as connection:
        proxy.set(Mode.STALL)
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            psycopg.connect(dsn, connect_timeout=2)
        ended: list[float] = []

        def ask() -> None:
            assert rows(connection) == ROWS
            ended.append(time.monotonic())

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(STALL_SECONDS)
        assert not ended
        passed = time.monotonic()
        proxy.set(Mode.PASS)
        thread.join(10)
        assert ended[0] >= passed
