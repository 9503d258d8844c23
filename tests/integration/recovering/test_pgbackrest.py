"""The same through pgBackRest itself, with the options that docs/physical-backups.md gives it; skipped without it."""

from __future__ import annotations

import shutil

import psycopg
import pytest

from embedded.bank import read_invariants
from embedded.bank_workload import BankWorkload
from embedded.server import EmbeddedNode, delete_server, start_server
from fleet.programs.wheel import run_as
from fleet.progress import Silent
from snapshots.create.initialise import initialise
from snapshots.create.request import CreateRequest
from snapshots.listing.listing import show_snapshot
from snapshots.listing.recovery_plan import NodeRecovery, plan_recovery
from snapshots.restore_point.restore_point import create_restore_point
from tests.integration.recovering.physical_place import RECOVERING, PhysicalPlace, await_promoted, run_all

PGBACKREST = shutil.which("pgbackrest")
pytestmark = pytest.mark.skipif(PGBACKREST is None, reason="there is no pgbackrest in PATH, so this is not tried")
SECONDS_MAX = 300


def words_of(source: EmbeddedNode, data: EmbeddedNode, *words: str) -> list[str]:
    """The command line of pgBackRest for the repository of `source` and the data of `data`."""
    repository = source.folder / "pgbackrest"
    options = {
        "config": "/dev/null", "stanza": source.id, "repo1-path": str(repository), "lock-path": f"{repository}/lock",
        "log-level-file": "off", "log-level-console": "warn", "pg1-path": str(data.data_directory),
        "pg1-socket-path": str(data.folder), "pg1-user": "postgres",
    }  # fmt: skip
    return [str(PGBACKREST), *(f"--{name}={value}" for name, value in options.items()), *words]


def run(place: PhysicalPlace, source: EmbeddedNode, data: EmbeddedNode, *words: str) -> None:
    done = run_as(place.programs(source).account, words_of(source, data, *words), seconds_max=SECONDS_MAX)
    assert done.returncode == 0, (done.stdout, done.stderr)


def back_up(place: PhysicalPlace, node: EmbeddedNode) -> None:
    run(place, node, node, "stanza-create")
    push = " ".join(words_of(node, node, "archive-push", '"%p"'))
    run_all(node, [f"ALTER SYSTEM SET archive_command = '{push}'", "SELECT pg_reload_conf()"])
    run(place, node, node, "backup", "--type=full", "--start-fast")


def recover(place: PhysicalPlace, plan: NodeRecovery) -> EmbeddedNode:
    source = place.servers.node(plan.node)
    node = place.new_node(source)
    target = [f"--target={plan.target}", "--target-exclusive", f"--target-timeline={plan.timeline}"]
    run(place, source, node, "restore", "--type=lsn", *target, "--target-action=promote")
    with (node.data_directory / "postgresql.auto.conf").open("a") as file:
        file.writelines(f"{line}\n" for line in RECOVERING)
    start_server(place.programs(source), node)
    await_promoted(node)
    run_all(node, plan.statements)
    return node


def test_backups_of_pgbackrest_are_recovered_to_a_restore_point(physical: PhysicalPlace) -> None:
    initialise(physical.fleet, Silent())
    with BankWorkload(physical.servers.dsns(), clients=3, pause_seconds=0.01):
        for node in physical.servers.primaries:
            back_up(physical, node)
        create_restore_point(physical.fleet, CreateRequest("by-pgbackrest"), Silent())
    for node in physical.servers.primaries:
        run(physical, node, node, "check")
    nodes = [recover(physical, one) for one in plan_recovery(show_snapshot(physical.fleet, "by-pgbackrest").chain)]
    try:
        invariants = read_invariants([node.dsn() for node in nodes])
        assert invariants.hold, invariants
        for node in nodes:
            with psycopg.connect(node.dsn()) as connection:
                assert connection.execute("SELECT count(*) FROM pg_prepared_xacts").fetchone() == (0,)
    finally:
        for node in nodes:
            delete_server(node)
        for node in physical.servers.primaries:
            run_all(node, ["ALTER SYSTEM RESET archive_command", "SELECT pg_reload_conf()"])
