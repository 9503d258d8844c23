"""Shards of several versions of PostgreSQL and of several encodings, under settings of users that change everything.

Judged byte by byte by PostgreSQL's own COPY and pg_dump. The databases of one server of each version are enough: every
case has databases of its own.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cli.create import lines_of as create_lines
from fleet.bank import create_bank, read_invariants
from fleet.bank_workload import BankWorkload
from fleet.config import Fleet, Node
from fleet.connections import with_database
from fleet.embedded import EmbeddedFleet, start_fleet, stop_fleet
from fleet.left_out import LeftOut, LeftOutKind
from fleet.preconditions import NodeUnfitError
from fleet.progress import Silent
from restore.target import TargetUnfitError
from snapshots.initialise import initialise
from tests.integration.encoded_tables import (
    CHANGES,
    EUC_JP,
    EVIL,
    FOLDED_CHANGES,
    FOLDED_SCHEMA,
    LATIN1,
    LATIN5,
    SCHEMA,
    SQL_ASCII,
    WIN1251,
    Encoded,
    be_hostile,
    copies,
    dump_command,
    run,
    session,
)
from tests.integration.refusing import create
from tests.snapshot_runs import Ready, Runs, described, run_command
from tests.soak import SOAK_SECONDS
from wal.slots import drop_slot

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POSTGRESQL_15 = Path("/usr/lib/postgresql/15/bin")
NAME = "mixed"
# The encodings of the two shards: the first has a standby that is copied too.
CASES = [(SQL_ASCII, LATIN1)]
if SOAK_SECONDS:
    CASES += [(LATIN1, SQL_ASCII), (EUC_JP, WIN1251), (WIN1251, EUC_JP), (LATIN5, EUC_JP)]
CROSSED_MIN, WAIT_SECONDS, REPLAY_SECONDS_MAX = 50, 0.05, 30
WHY = "PostgreSQL 15 does not decode WAL on a standby, 16 does: check has no copy of it"


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedFleet]:
    """A shard of the wheel's version and one of 15, each with a standby."""
    if not (POSTGRESQL_15 / "postgres").exists():
        pytest.skip(f"there is no PostgreSQL 15 in {POSTGRESQL_15}")
    directory = tmp_path_factory.mktemp("mixed") / "fleet"
    try:
        yield start_fleet(directory, shards=2, backups=1, schema=False, programs={"s2": POSTGRESQL_15})
    finally:
        stop_fleet(directory, delete=True)


def database_of(one: Encoded) -> str:
    return f"in_{one.encoding.lower()}"


def create_database(server: str, database: str, encoding: str) -> None:
    with session(server) as connection:
        options = f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'"
        connection.execute(f"CREATE DATABASE {database} {options}".encode())


def await_standbys(embedded: EmbeddedFleet) -> None:
    """Wait until every standby has the databases that its primary has."""
    for primary in embedded.primaries:
        with psycopg.connect(primary.dsn("postgres")) as connection:
            row = connection.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        for backup in embedded.backups_of(primary):
            with psycopg.connect(backup.dsn("postgres"), autocommit=True) as connection:
                deadline = time.monotonic() + REPLAY_SECONDS_MAX
                while connection.execute("SELECT pg_last_wal_replay_lsn() < %s::pg_lsn", row).fetchone() != (False,):
                    assert time.monotonic() < deadline
                    time.sleep(0.05)


def fleet_of(embedded: EmbeddedFleet, directory: Path, case: tuple[Encoded, Encoded]) -> Fleet:
    """The fleet of the case's databases, filled, with a store of its own."""
    fleet = described(embedded, directory / "fleet.toml", f"file://{directory}/store")
    names = {node.id: database_of(one) for node, one in zip(embedded.primaries, case, strict=True)}
    nodes = tuple(with_database(node, names[node.shard]) for node in fleet.nodes)
    for node, one in zip(embedded.primaries, case, strict=True):
        create_database(node.dsn("postgres"), database_of(one), one.encoding)
        run(node.dsn(database_of(one)), [*one.script(EVIL), *one.script(SCHEMA), *one.rows()])
    if case[1].encoding != "SQL_ASCII":
        # The wheel's server has no ICU.
        run(embedded.primaries[1].dsn(database_of(case[1])), case[1].script(FOLDED_SCHEMA))
    await_standbys(embedded)
    return replace(fleet, nodes=nodes)


def change(fleet: Fleet, case: tuple[Encoded, Encoded], number: int) -> list[dict[bytes, bytes]]:
    """Make the changes before an increment; the state that it is to have."""
    for node, one in zip(fleet.primaries, case, strict=True):
        run(node.dsn, one.script(CHANGES[number]))
    if case[1].encoding != "SQL_ASCII":
        run(fleet.primaries[1].dsn, case[1].script(FOLDED_CHANGES[number]))
    return [copies(node.dsn) for node in fleet.primaries]


@contextmanager
def slots_dropped(fleet: Fleet) -> Iterator[None]:
    """Drop what the chains leave on the servers; by sessions that the settings of the role don't reach."""
    try:
        yield
    finally:
        for node in fleet.nodes:
            with session(node.dsn) as connection:
                query = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cutline%'"
                slots = [name.decode() for (name,) in connection.execute(query)]
            for slot in slots:
                assert drop_slot(node, slot)


def dumped(dsn: str) -> bytes:
    return subprocess.run(dump_command(dsn), capture_output=True, check=True).stdout


def on(fleet: Fleet, database: str, *, one_server: bool = False) -> Fleet:
    """Where a restore goes: a database of each server, or two of the first one."""
    first, second = (with_database(node, f"{database}_{node.id}") for node in fleet.primaries)
    if one_server:
        second = Node(second.id, with_database(first, f"{database}_{second.id}").dsn)
    return replace(fleet, nodes=(first, second))


def test_a_bank_at_work_on_two_versions_is_whole_at_every_cut(
    embedded: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = described(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for shard, node in enumerate(fleet.primaries):
        create_database(embedded.node(node.id).dsn("postgres"), "bank", "UTF8")
        create_bank(node.dsn, shard=shard)
    await_standbys(embedded)
    runs, target = Runs(fleet, Ready(spark)), on(fleet, "bank")
    with slots_dropped(fleet):
        runs.init()
        with BankWorkload([node.dsn for node in fleet.primaries], clients=4, pause_seconds=0.005) as bank:
            runs.full(NAME)
            began = bank.committed
            while bank.committed.cross < began.cross + CROSSED_MIN:
                assert bank.wait(WAIT_SECONDS)
            runs.increment(NAME)
            bank.stop()
        runs.increment(NAME)
        for increment in (1, 2):
            runs.restore(NAME, target, increment)
            assert read_invariants([node.dsn for node in target.primaries]).hold, increment
        assert [copies(node.dsn) for node in target.primaries] == [copies(node.dsn) for node in fleet.primaries]
        report = runs.check_one(NAME)
        assert report.conflicts == []
        assert CROSSED_MIN <= report.compared.transactions <= bank.committed.cross


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(one.encoding for one in case))
def test_every_byte_of_every_encoding_comes_back_on_every_version(
    embedded: EmbeddedFleet, spark: SparkSession, tmp_path: Path, case: tuple[Encoded, Encoded]
) -> None:
    fleet = fleet_of(embedded, tmp_path, case)
    runs = Runs(fleet, Ready(spark))
    for node in fleet.primaries:
        be_hostile(node.dsn)
    states = [[copies(node.dsn) for node in fleet.primaries]]
    with slots_dropped(fleet):
        runs.init()
        full = runs.full(NAME)
        assert full.left_out is not None
        assert [one for one in full.left_out if one.kind == LeftOutKind.STANDBY_COPY] == [
            LeftOut("s2", LeftOutKind.STANDBY_COPY, "s2-b1", WHY)
        ]
        assert any("s2-b1 on s2" in line for line in create_lines(full))
        commits = []
        for number in range(len(CHANGES)):
            states.append(change(fleet, case, number))
            commits.append(runs.increment(NAME))
        # Two of each shard over both, by gid and by tag, in other bytes and the same text; and one of each by itself.
        assert commits[0].cut.cut.global_transactions == 2 * len({one.text for one in case}) + 2
        assert any(one.kind == LeftOutKind.STANDBY_COPY for one in commits[-1].left_out or ())
        target = on(fleet, "same")
        for increment, state in enumerate(states):
            if increment or SOAK_SECONDS:
                runs.restore(NAME, target, increment)
                assert [copies(node.dsn) for node in target.primaries] == state, f"increment {increment}"
        assert [dumped(node.dsn) for node in target.primaries] == [dumped(node.dsn) for node in fleet.primaries]
        newer = on(fleet, "newer", one_server=True)
        runs.restore(NAME, newer)
        assert [copies(node.dsn) for node in newer.primaries] == states[-1]
        assert_older_is_refused(runs, on(fleet, "older"))
        assert_said(runs)


def assert_older_is_refused(runs: Runs, target: Fleet) -> None:
    first, second = target.primaries
    crossed = replace(target, nodes=(Node(first.id, second.dsn), Node(second.id, first.dsn)))
    with pytest.raises(TargetUnfitError, match="node s1: PostgreSQL 15 is older than the snapshot's 18"):
        runs.restore(NAME, crossed)


def assert_said(runs: Runs) -> None:
    """That the copy is left out is said by show, list and check; check counts it for none."""
    report = runs.check_one(NAME)
    assert report.conflicts == []
    assert [(one.what, one.why) for one in report.skipped] == [
        ("rows of shard s2", f"it has no backup copy to compare with; s2-b1: {WHY}")
    ]
    assert report.result == "inconclusive"
    assert report.compared.partitions > 0
    # The commands know the nodes by their file.
    text = runs.fleet.path.read_text()
    for node in runs.fleet.nodes:
        text = text.replace(node.dsn.rpartition("/")[0] + "/bank", node.dsn)
    runs.fleet.path.write_text(text)
    for command in (["show", NAME], ["list"]):
        code, document = run_command(runs.fleet, *command)
        assert code == 0
        assert "s2-b1" in str(document)


def test_a_name_that_is_no_text_is_refused_and_said(embedded: EmbeddedFleet, tmp_path: Path) -> None:
    fleet = described(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    server = embedded.primaries[0].dsn("postgres")
    create_database(server, "unnamed", "SQL_ASCII")
    only = replace(fleet, nodes=(with_database(fleet.primaries[0], "unnamed"),))
    initialise(only, Silent())
    run(only.nodes[0].dsn, [b'CREATE TABLE "t\xff" ("c\xfe" int PRIMARY KEY)', 'CREATE TABLE "é" (id int)'.encode()])
    with pytest.raises(NodeUnfitError, match=r"node s1: .*column c\\xfe.*relation t\\xff") as raised:
        create(only, "refused")
    assert "é" not in raised.value.message
