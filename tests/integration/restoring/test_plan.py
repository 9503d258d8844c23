"""The plan of a restore says what it will do, and is based on what is known: counts, sizes, and what restores took."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psycopg
import pytest
from msgspec import UnsetType, structs
from psycopg.conninfo import make_conninfo

from cutline.cli.output.restore_report import document_of, lines_of, plan_document, plan_lines
from cutline.cli.output.tables import size_text
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.restore.estimates.estimate import read_measured
from cutline.restore.plan.plan import LockedTargets, RestorePlan, plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.preview import RestorePreview, _space_of, check_restore, preview_restore
from cutline.restore.run.restore import restore_fleet
from cutline.restore.targets.obstacles import Obstacles
from cutline.restore.targets.requirements import DatabaseSpace, SpaceLackingError, check_space, find_data_directory
from cutline.restore.targets.target import lock_targets
from cutline.snapshots.records.commit import DatabaseFacts
from cutline.snapshots.records.operation_records import read_outcome
from tests.commands.in_process import run_and_capture, run_here
from tests.commands.snapshot_runs import Ready
from tests.integration.refusing import execute
from tests.integration.restoring.target_place import NAME, Place, open_restores
from tests.run.by_spark import in_driver

# Of the tables of the place and the bank's accounts; a change of a key is two changes.
ROWS, CHANGES = 300 + 200 + 10_000, 100 + 6 + 6 + 10 + 2


@pytest.fixture
def role(place: Place) -> Iterator[str]:
    """A role that may not see where the server has its data."""
    server = place.target.primaries[0]
    execute(with_database(server, "postgres").dsn, "CREATE ROLE plain LOGIN")
    try:
        yield make_conninfo(with_database(server, "postgres").dsn, user="plain")
    finally:
        execute(with_database(server, "postgres").dsn, "DROP ROLE plain")


def plan_of(place: Place) -> RestorePlan:
    return plan_restore(place.fleet, place.target, RestoreRequest(NAME))


def with_facts(plan: RestorePlan, facts: DatabaseFacts | None) -> RestorePlan:
    """The plan of a chain whose newest commits have these facts, or none at all."""
    databases = dict.fromkeys(plan.chain.baseline, facts) if facts else {}
    increments = tuple(structs.replace(one, databases={}) for one in plan.chain.increments)
    full = structs.replace(plan.chain.full, databases=databases)
    return structs.replace(plan, chain=structs.replace(plan.chain, full=full, increments=increments))


def previewed(plan: RestorePlan) -> RestorePreview:
    return preview_restore(plan, Silent())


def test_the_plan_says_what_goes_where_and_what_there_is_room_for(place: Place) -> None:
    plan = plan_of(place)
    preview = previewed(plan)
    document = plan_document(plan, preview)
    made_at = datetime.fromisoformat(document["cut_at"])
    assert plan.chain.last.cut.made_at == document["cut_at"]
    assert 0 < document["age_seconds"] < (datetime.now(UTC) - made_at).total_seconds() + 0.01
    for node, source, target in zip(place.target.primaries, place.fleet.primaries, document["targets"], strict=True):
        assert (target["node"], target["database"]) == (node.id, "shop")
        assert (target["rows"], target["changes"]) == (ROWS, CHANGES)
        with psycopg.connect(source.dsn) as connection:
            (size,) = connection.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
        # Statistics and vacuum may have changed it since the cut.
        assert abs(target["size_bytes"] - size) < 2 << 20
    # All servers are on one disk.
    (disk,) = document["disks"]
    assert disk["nodes"] == ["s1", "s2", "s3"]
    assert disk["needed_bytes"] == sum(one["size_bytes"] for one in document["targets"])
    found = os.statvfs(place.servers.primaries[0].data_directory)
    assert abs(disk["free_bytes"] - found.f_bavail * found.f_frsize) < 1 << 30
    lines = plan_lines(plan, preview)
    assert lines[0] == f"source: {NAME} at increment 1, from {place.fleet.store.open().url}"
    assert re.fullmatch(rf"cut: {re.escape(document['cut_at'])}, (just now|\d+ min ago)", lines[1])
    assert lines[2].startswith(
        f"s1 to database shop on {document['targets'][0]['server']}: 10,500 rows and 124 changes, "
    )
    assert lines[-1].startswith("disk of s1, s2, s3: ")


def test_too_little_space_is_an_obstacle_and_a_rough_need_only_a_warning(place: Place) -> None:
    plan = plan_of(place)
    with pytest.raises(SpaceLackingError, match=r"nodes s1, s2, s3: 3\.0 PiB needed on disk, .* free$"):
        previewed(with_facts(plan, DatabaseFacts(1 << 50)))
    early = previewed(with_facts(plan, None))
    assert [volume.is_rough for volume in early.volumes.values()] == [True] * 3
    assert "roughly" in plan_lines(plan, early)[-1]
    assert early.warnings == []


def test_what_a_killed_restore_has_loaded_needs_no_space_again(place: Place, tmp_path: Path) -> None:
    plan = plan_of(place)
    first = plan.targets[0]
    execute(first.maintenance.dsn, f'CREATE DATABASE "{first.loading}"')
    try:
        execute(first.loaded.dsn, "CREATE TABLE filler AS SELECT repeat('x', 5000000)")
        with lock_targets(plan.targets) as connections:
            found = check_restore(LockedTargets(plan, connections, tmp_path, Obstacles()), plan.targets)
            query = "SELECT pg_database_size(%s)"
            (size,) = connections[first.shard].execute(query, (first.loading,)).fetchone() or (0,)
    finally:
        execute(first.maintenance.dsn, f'DROP DATABASE "{first.loading}"')
    needs = [volume.size_bytes for volume in found.volumes.values()]
    assert found.disks[0].needed_bytes == sum(needs) - min(size, needs[0])
    assert size > 7 << 20


def test_what_is_free_is_not_known_of_a_server_whose_data_can_not_be_told(place: Place, role: str) -> None:
    node = with_database(place.target.primaries[0], "postgres")
    with connect(node) as connection:
        assert find_data_directory(connection) == place.servers.primaries[0].data_directory
    plan = plan_of(place)
    preview = previewed(plan)
    target, volume = plan.targets[0], preview.volumes["s1"]
    with connect(replace(node, dsn=role)) as connection:
        assert find_data_directory(connection) is None
        hidden = check_space([_space_of(plan, target, connection, volume)], Obstacles())
    elsewhere = check_space([DatabaseSpace(target.node, None, volume.size_bytes, is_rough=False)], Obstacles())
    for disks, why in (
        (hidden, "the role is not allowed to see the server's data_directory"),
        (elsewhere, "the server is not running on this machine, or its data can't be read here"),
    ):
        assert plan_lines(plan, structs.replace(preview, disks=disks))[-1].endswith(f", free space unknown: {why}")


def test_an_estimate_is_based_on_what_a_recent_restore_of_its_size_took(place: Place) -> None:
    store = place.fleet.store.open()
    plan = plan_of(place)
    try:
        told: list[RestorePreview] = []
        report = restore_fleet(plan, Ready(in_driver(place.spark)), Silent(), announce=told.append)
        outcome = read_outcome(store, plan.intent.operation)
        assert outcome
        assert not isinstance(outcome.figures, UnsetType)
        (first,) = told
        assert first.estimate.basis != plan.intent.operation
        assert outcome.figures.rows == report.rows == sum(one.rows for one in report.nodes)
        assert {name: one.rows for name, one in outcome.figures.nodes.items()} == {n.node: n.rows for n in report.nodes}
        # All changes of a shard were sent at once: they are one transaction.
        assert outcome.volumes == {"rows": report.rows, "bytes": report.bytes, "transactions": 3}
        # By shard: 100 rows get another n, 6 another key, which are a deletion and an insertion; 10 lines go, 2 come.
        assert report.wal is not None
        assert (report.wal.changes, report.wal.transactions) == (3 * (100 + 2 * 6 + 10 + 2), 3)
        assert 0 < report.wal.seconds == pytest.approx(outcome.figures.steps["fold changes"].seconds, abs=0.001)
        assert report.wal.seconds < report.seconds
        stored = list((place.stored / "snapshots" / NAME / "wal").glob("s?/*/*.parquet"))
        assert (report.wal.segments, report.wal.bytes) == (len(stored), sum(one.stat().st_size for one in stored))
        assert document_of(report)["wal"]["changes"] == report.wal.changes
        text = f"WAL: {report.wal.changes} changes in 3 transactions, {size_text(report.wal.bytes)}, read in "
        assert any(line.startswith(text) for line in lines_of(report, is_verbose=True))
        assert 0.5 * report.seconds < outcome.figures.seconds <= report.seconds
        # The same again is expected to take as long, except for what is between the steps.
        again = plan_restore(place.fleet, place.target, RestoreRequest(NAME, replace=True))
        assert read_measured(store, again.decided, report.rows) == (plan.intent.operation, outcome.figures)
        estimate = previewed(again).estimate
        assert estimate.basis == plan.intent.operation
        assert estimate.total == pytest.approx(outcome.figures.seconds, rel=0.1, abs=0.5)
        assert f"based on {plan.intent.operation}" in "\n".join(plan_lines(again, previewed(again)))
    finally:
        for node in place.target.primaries:
            execute(with_database(node, "postgres").dsn, "DROP DATABASE IF EXISTS shop WITH (FORCE)")
    assert open_restores(place) == []


def test_a_time_chooses_the_newest_cut_not_after_it_and_the_plan_names_the_next(place: Place) -> None:
    full, increment = (cut["made_at"] for cut in run_here(place.fleet, "show", NAME)[1]["cuts"])
    words = ["restore", NAME, "--to", str(place.target.path), "--dry-run", "--at"]
    code, early = run_here(place.fleet, *words, full)
    assert (code, early["increment"], early["plan"]["cut_at"], early["plan"]["next_cut_at"]) == (0, 0, full, increment)
    code, text = run_and_capture(place.fleet, *words, full)
    assert f"the next cut, that of increment 1, is after --at: {increment}" in text
    code, late = run_here(place.fleet, *words, increment)
    assert (code, late["increment"], late["plan"]["next_cut_at"]) == (0, 1, None)
