"""Every refusal has a name and an exit code and changes nothing; of two equal commands, one wins."""

from __future__ import annotations

import getpass
import os
import re
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from psycopg.conninfo import make_conninfo

from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Node
from cutline.fleet.crash_points import CrashPoint
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.nodes.lock import lock_fleet
from cutline.nodes.sessions import open_sessions
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.target import lock_targets
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.storage.errors import SnapshotError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import (
    Runs,
    names_of_snapshots,
    run_command,
    runs_on,
)
from tests.commands.watching import Reached, Watching
from tests.faults.ports import HOST, free_ports
from tests.integration.refusing import NoSpark, changed, create, execute, refused, take_increment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


NAME = "refused"
WAIT_SECONDS_MAX = 60


@pytest.fixture(scope="module")
def chain(shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The shared fleet with one full snapshot and one increment in a new store."""
    with runs_on(shared_fleet, tmp_path_factory.mktemp("refusals"), spark) as runs:
        runs.full(NAME)
        runs.increment(NAME)
        yield runs


def test_a_table_without_replica_identity_is_refused_by_name(chain: Runs) -> None:
    with changed(chain.fleet.primaries[1].dsn, "CREATE TABLE keyless (a int)", "DROP TABLE keyless"):
        with refused(chain.fleet, "table-not-admissible") as errors:
            create(chain.fleet, "another")
        assert "public.keyless on s2" in errors[0].message
        with refused(chain.fleet, "table-not-admissible"):
            initialise(chain.fleet, Silent())


def test_a_name_that_is_taken_is_refused(chain: Runs) -> None:
    with refused(chain.fleet, "snapshot-exists"):
        create(chain.fleet, NAME)


def test_an_increment_of_a_missing_snapshot_is_refused(chain: Runs) -> None:
    with refused(chain.fleet, "snapshot-missing"):
        take_increment(chain.fleet, "nothing")


def test_a_restore_to_a_missing_increment_is_refused(chain: Runs) -> None:
    with refused(chain.fleet, "snapshot-missing") as errors:
        plan_restore(chain.fleet, chain.fleet, RestoreRequest(NAME, 9))
    assert "increment 9" in errors[0].message
    assert "newest increment is 1" in errors[0].hint


def test_a_restore_over_an_existing_database_is_refused(chain: Runs) -> None:
    with refused(chain.fleet, "target-exists") as errors:
        restore_fleet(plan_restore(chain.fleet, chain.fleet, RestoreRequest(NAME)), NoSpark(), Silent())
    assert "--replace" in errors[0].hint


def test_the_second_of_two_restores_of_one_database_names_the_first(chain: Runs) -> None:
    request = RestoreRequest(NAME, replace=True)
    with (
        lock_targets(plan_restore(chain.fleet, chain.fleet, request).targets),
        refused(chain.fleet, "fleet-busy", 7) as errors,
    ):
        preview_restore(plan_restore(chain.fleet, chain.fleet, request), Silent())
    assert f"node s1: another operation is running: restore bank by {getpass.getuser()}@" in errors[0].message
    assert errors[0].details["process"] == os.getpid()


def test_a_session_of_a_restore_that_a_server_ends_is_an_unreachable_node(chain: Runs) -> None:
    """A function of a table's owner may end it, as may an administrator."""
    plan = plan_restore(chain.fleet, chain.fleet, RestoreRequest(NAME, replace=True))
    with refused(chain.fleet, "node-unreachable", 6) as errors, lock_targets(plan.targets) as connections:
        ended = connections["s2"]
        execute(plan.targets[1].maintenance.dsn, f"SELECT pg_terminate_backend({ended.info.backend_pid})")
        ended.execute("SELECT 1")
    assert errors[0].details["node"] == "s2"


def test_a_restore_into_a_standby_is_refused(chain: Runs) -> None:
    standbys = {node.backup_of: node for node in chain.fleet.nodes if node.backup_of}
    nodes = tuple(Node(node.id, with_database(standbys[node.id], "x").dsn) for node in chain.fleet.primaries)
    with refused(chain.fleet, "target-unfit"):
        plan = plan_restore(chain.fleet, replace(chain.fleet, nodes=nodes), RestoreRequest(NAME))
        restore_fleet(plan, NoSpark(), Silent())


def test_a_standby_of_another_primary_is_refused(chain: Runs) -> None:
    crossed = {"s1-b1": "s2", "s2-b1": "s1"}
    nodes = tuple(replace(node, backup_of=crossed.get(node.id)) for node in chain.fleet.nodes)
    with refused(chain.fleet, "fleet-topology") as errors:
        create(replace(chain.fleet, nodes=nodes), "another")
    assert re.search(r"s.-b1 is a standby of a different primary", errors[0].message)


def test_a_standby_listed_as_a_primary_and_a_server_listed_twice_are_refused(chain: Runs) -> None:
    fleet = chain.fleet
    with refused(fleet, "fleet-topology"):
        create(
            replace(fleet, nodes=tuple(replace(node, backup_of=None) for node in fleet.nodes)),
            "another",
        )
    twin = replace(fleet.primaries[0], id="twin", dsn=make_conninfo(fleet.primaries[0].dsn, application_name="twin"))
    with refused(fleet, "fleet-topology") as errors:
        create(replace(fleet, nodes=(*fleet.nodes, twin)), "another")
    assert "are the same server" in errors[0].message


def test_a_chain_refuses_another_fleet(chain: Runs) -> None:
    fleet = chain.fleet
    without_one = replace(fleet, nodes=tuple(node for node in fleet.nodes if node.shard != "s2"))
    with refused(fleet, "baseline-changed") as errors:
        take_increment(without_one, NAME)
    assert "node s2: it is a shard of the chain, but not in fleet.toml" in errors[0].message
    names = {"s1": "s2", "s2": "s1"}
    swapped = tuple(
        replace(node, id=names[node.id]) if node.id in names else replace(node, backup_of=names[node.shard])
        for node in fleet.nodes
    )
    with refused(fleet, "baseline-changed"):
        take_increment(replace(fleet, nodes=swapped), NAME)


def test_a_node_that_does_not_answer_is_named(chain: Runs) -> None:
    (port,) = free_ports(1)
    dsn = make_conninfo(chain.fleet.primaries[1].dsn, host=HOST, port=port)
    nodes = tuple(replace(node, dsn=dsn) if node.id == "s2" else node for node in chain.fleet.nodes)
    fleet = replace(chain.fleet, nodes=nodes)
    with refused(chain.fleet, "node-unreachable", 6) as errors:
        create(fleet, "another")
    assert "s2" in errors[0].message
    assert dsn not in errors[0].message
    with refused(chain.fleet, "node-unreachable", 6):
        take_increment(fleet, NAME)


def test_while_one_operation_runs_no_other_starts(chain: Runs) -> None:
    with (
        open_sessions(chain.fleet, chain.fleet.nodes) as sessions,
        lock_fleet(sessions, chain.fleet.name),
    ):
        for command in (lambda: create(chain.fleet, "another"), lambda: take_increment(chain.fleet, NAME)):
            with refused(chain.fleet, "fleet-busy", 7):
                command()
        code, document = run_command(chain.fleet, "create", NAME, "--incremental")
    assert (code, document["error"]) == (7, "fleet-busy")


def test_one_of_two_concurrent_creates_of_an_increment_wins(chain: Runs) -> None:
    """On a busy machine one could be over before the other has begun: whichever has the lock waits for the other."""
    results: list[object] = []
    is_refused = threading.Event()

    def wait(reached: Reached) -> None:
        if reached.point == CrashPoint.LOCKED:
            is_refused.wait(WAIT_SECONDS_MAX)

    def create_one() -> None:
        try:
            made = create_increment(chain.fleet, CreateRequest(NAME), chain.spark, Watching(wait))
            results.append(made.increment)
        except SnapshotError as error:
            results.append(error.exit_code)
            is_refused.set()

    threads = [threading.Thread(target=create_one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_SECONDS_MAX)
    assert sorted(map(str, results)) == ["2", "7"]
    assert names_of_snapshots(chain.fleet) == [NAME]


@pytest.mark.parametrize(("command", "slug", "code"), [
    (("create", NAME), "snapshot-exists", 3),
    (("create", "nothing", "--incremental"), "snapshot-missing", 3),
    (("restore", NAME), "target-exists", 3),
    (("restore", NAME, "--increment", "9"), "snapshot-missing", 3),
    (("restore", "nothing"), "snapshot-missing", 3),
    (("check", "nothing"), "snapshot-missing", 3),
    (("check", NAME, "--increment", "9"), "snapshot-missing", 3),
    (("show", "nothing"), "snapshot-missing", 3),
    (("show", NAME, "--increment", "9"), "snapshot-missing", 3),
    (("list", "nothing"), "snapshot-missing", 3),
    (("merge", NAME, "--to", "9"), "snapshot-missing", 3),
    (("keep", f"{NAME}@9"), "snapshot-missing", 3),
    (("end", "nothing", "--yes"), "snapshot-missing", 3),
    (("delete", "nothing", "--yes"), "snapshot-missing", 3),
    (("create", "bad/name"), "usage", 2),
])  # fmt: skip
def test_a_refusal_reports_its_exit_code_and_its_name(
    chain: Runs, command: tuple[str, ...], slug: str, code: int
) -> None:
    # The first one runs in a separate process.
    found, document = (run_command if command == ("create", NAME) else run_here)(chain.fleet, *command)
    assert (found, document["error"], document["code"]) == (code, slug, code)
