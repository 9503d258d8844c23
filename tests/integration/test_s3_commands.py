"""The commands as processes on S3 servers that are no test doubles."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet, load_fleet
from tests.s3_kinds import REAL_KINDS, S3Place
from tests.snapshot_runs import chains_dropped, described, run_command, sorted_copies, transfers_taken_back

NAME = "real"
RESTORED = "restored"
# Several commands as processes, each of which starts a JVM, on a machine that may be doing other things.
CHAIN_SECONDS_MAX = 900


@pytest.fixture(params=REAL_KINDS)
def fleet(request: pytest.FixtureRequest, shared_fleet: EmbeddedFleet, tmp_path: Path) -> Iterator[Fleet]:
    server: S3Place = request.getfixturevalue(request.param)
    fleet = described(shared_fleet, tmp_path / "fleet.toml", server.bucket("commands"), server.options)
    with chains_dropped(fleet), transfers_taken_back(shared_fleet.dsns()):
        yield fleet


@pytest.fixture
def target(fleet: Fleet, shared_fleet: EmbeddedFleet) -> Iterator[Fleet]:
    """The same servers, with other databases to restore into."""
    path = fleet.path.with_name("target.toml")
    path.write_text(re.sub(r"(?m)^(dsn = .*)/bank", rf"\1/{RESTORED}", fleet.path.read_text()))
    loaded = load_fleet(path)
    try:
        yield loaded
    finally:
        for node in shared_fleet.primaries:
            with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
                connection.execute(f"DROP DATABASE IF EXISTS {RESTORED} WITH (FORCE)".encode())


@pytest.mark.timeout(CHAIN_SECONDS_MAX)
def test_create_increment_restore_and_check_on_a_real_server(
    fleet: Fleet, target: Fleet, shared_fleet: EmbeddedFleet
) -> None:
    def run(*words: str) -> dict[str, object]:
        code, document = run_command(fleet, *words)
        assert code == 0, document
        return document

    run("init")
    assert run("create", NAME)["increment"] == 0
    for dsn in shared_fleet.dsns():
        with psycopg.connect(dsn) as connection:
            connection.execute(
                "INSERT INTO transfer SELECT gen_random_uuid(), 1, 2, n FROM generate_series(1, 50) AS n"
            )
    increment = run("create", NAME, "--incremental")
    assert (increment["increment"], increment["transactions"]) == (1, len(shared_fleet.dsns()))
    run("restore", NAME, "--to", str(target.path))
    for source, copy in zip(shared_fleet.dsns(), target.primaries, strict=True):
        assert sorted_copies(copy.dsn) == sorted_copies(source)
    assert run("check", NAME)["result"] == "valid"
    (listed,) = run("list")["snapshots"]  # type: ignore[misc]
    assert [one["number"] for one in listed["increments"]] == [1]
