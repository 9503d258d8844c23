"""Physical backups that are recovered to a cut's positions are what Cutline restores at that cut, row by row.

The short form takes three cuts and a restore point under load; the long form (CUTLINE_SOAK) a hundred cuts.
"""

from __future__ import annotations

import json
import os
import subprocess
import uuid
from pathlib import Path
from typing import Any

import psycopg
import pytest

from cutline.embedded.bank import read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.fleet.progress import Silent
from cutline.nodes.connections import with_database
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.restore_point import create_restore_point
from tests.commands.snapshot_runs import command_line, run_command, sorted_copies
from tests.integration.recovering.physical_place import RESTORED, PhysicalPlace, prepared_on, run_all
from tests.run.soak import SOAK_SECONDS

NAME = "nightly"
CUTS_LONG = 100
ROOT = Path(__file__).parents[3]
TRANSFER = "INSERT INTO transfer VALUES ('{id}', 1, 10001, 0, '2026-01-01')"


def prepare_transfer(place: PhysicalPlace, gid: str) -> None:
    """Prepare a transfer of nothing across both shards: it locks no account."""
    row = TRANSFER.format(id=uuid.uuid4())
    for node in place.servers.primaries:
        run_all(node, ["BEGIN", row, f"PREPARE TRANSACTION '{gid}'"])


def decide(place: PhysicalPlace, gid: str, how: str, *shards: int) -> None:
    for shard in shards:
        run_all(place.servers.primaries[shard], [f"{how} PREPARED '{gid}'"])


def plan_of(place: PhysicalPlace, name: str, increment: int) -> list[dict[str, Any]]:
    code, document = run_command(place.fleet, "show", name, "--increment", str(increment), "--recovery-plan")
    assert code == 0, document
    plan: list[dict[str, Any]] = document["recovery_plan"]
    return plan


def drop_restored(place: PhysicalPlace) -> None:
    for node in place.fleet.primaries:
        with psycopg.connect(with_database(node, "postgres").dsn, autocommit=True) as connection:
            for (name,) in connection.execute(
                f"SELECT datname FROM pg_database WHERE datname ^@ '{RESTORED}'"
            ).fetchall():
                connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)'.encode())


def restored_rows(place: PhysicalPlace, increment: int) -> list[dict[str, bytes]]:
    place.runs.restore(NAME, place.target, increment)
    try:
        return [sorted_copies(node.dsn) for node in place.target.primaries]
    finally:
        drop_restored(place)


def recovered_rows(place: PhysicalPlace, plan: list[dict[str, Any]]) -> list[dict[str, bytes]]:
    """Recover to the plan and run its statements; assert that nothing is torn or left prepared."""
    with place.recovered(plan) as nodes:
        for node, one in zip(nodes, plan, strict=True):
            assert prepared_on(node) == sorted(part["gid"] for part in one["prepared"])
            run_all(node, one["statements"])
            assert prepared_on(node) == []
        invariants = read_invariants([node.dsn() for node in nodes])
        assert invariants.hold, invariants
        return [sorted_copies(node.dsn()) for node in nodes]


def take_cuts(place: PhysicalPlace, increments: int) -> None:
    """Take increments under load, each while one transfer is half committed and one is undecided everywhere."""
    for number in range(1, increments + 1):
        prepare_transfer(place, f"early-{number}")
        decide(place, f"early-{number}", "COMMIT", number % 2)
        prepare_transfer(place, f"late-{number}")
        place.runs.increment(NAME)
        if number > 1:
            # The one before stayed in doubt for two cuts.
            decide(place, f"early-{number - 1}", "COMMIT", number % 2)
            decide(place, f"late-{number - 1}", "ROLLBACK" if number % 3 else "COMMIT", 0, 1)
    decide(place, f"early-{increments}", "COMMIT", 1 - increments % 2)
    decide(place, f"late-{increments}", "COMMIT", 0, 1)


@pytest.fixture(scope="module")
def cuts(physical: PhysicalPlace) -> int:
    """A full snapshot, increments and a restore point, taken under load after base backups were; how many cuts."""
    increments = CUTS_LONG - 1 if SOAK_SECONDS else 2
    physical.runs.init()
    with BankWorkload(physical.servers.dsns(), clients=3, pause_seconds=0.01):
        physical.back_up()
        physical.runs.full(NAME)
        take_cuts(physical, increments)
        create_restore_point(physical.fleet, CreateRequest("point"), Silent())
    physical.archive()
    return increments + 1


@pytest.mark.timeout(7200)
def test_recovered_backups_have_the_restored_rows(physical: PhysicalPlace, cuts: int) -> None:
    seen: list[str] = []
    for number in range(0 if SOAK_SECONDS else 1, cuts):
        plan = plan_of(physical, NAME, number)
        seen += [statement for one in plan for statement in one["statements"]]
        assert recovered_rows(physical, plan) == restored_rows(physical, number), number
    # What was in doubt at two cuts is decided at both.
    assert seen.count("COMMIT PREPARED 'early-1';") == 2
    assert seen.count("ROLLBACK PREPARED 'late-1';") == 4


def test_a_restore_writes_what_was_in_doubt(physical: PhysicalPlace, cuts: int, tmp_path: Path) -> None:
    assert cuts > 1
    words = command_line(
        physical.fleet, "restore", NAME, "--increment", "1", "--to", str(physical.target.path), "--json"
    )
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=600, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    drop_restored(physical)
    assert done.returncode == 0, done.stderr
    listed = json.loads(done.stdout)["transactions"]
    assert json.loads((tmp_path / f"{NAME}-1-transactions.json").read_text())["transactions"] == listed
    by_hand = {one["global_id"]: one for one in listed if not one["global_id"].startswith("bank-")}
    states = {
        gid: (one["decision"], {part["node"]: (part["gid"], part["state"]) for part in one["nodes"]})
        for gid, one in by_hand.items()
    }
    assert states == {
        "early-1": ("commit", {"s1": ("early-1", "prepared"), "s2": ("early-1", "committed")}),
        "late-1": ("rollback", {"s1": ("late-1", "prepared"), "s2": ("late-1", "prepared")}),
    }


def test_recovered_backups_are_not_torn_at_a_restore_point(physical: PhysicalPlace, cuts: int) -> None:
    assert cuts
    rows = recovered_rows(physical, plan_of(physical, "point", 0))
    # Of the transfers by hand, which were all decided before, the early ones and every third late one were committed.
    late = [number for number in range(1, cuts) if (number + 1) % 3 == 0 or number == cuts - 1]
    committed = cuts - 1 + len(late)
    assert [row["public.transfer"].count(b"\t0\t2026-01-01") for row in rows] == [committed, committed]
