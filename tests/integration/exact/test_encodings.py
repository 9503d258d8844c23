"""Shards of several PostgreSQL versions and several encodings, under user settings that change everything.

Compared byte by byte, by PostgreSQL's own COPY and pg_dump. One server of each version is enough: every case has its
own databases.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.cli.commands.create import lines_of as create_lines
from cutline.embedded.bank import create_bank, read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet, Node
from cutline.fleet.progress import Silent
from cutline.nodes.connections import connect, with_database
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.nodes.problems import NodeUnfitError
from cutline.restore.targets.target import TargetUnfitError
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import preview_full
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.ddl.database_facts import read_properties
from cutline.snapshots.records.commit import DatabaseSetting
from cutline.wal.drain.open_transactions import prepared_transactions
from tests.chains.mixed_databases import (
    await_standbys,
    change,
    create_database,
    create_fleet,
    slots_dropped,
    target_fleet,
    targets_dropped,
)
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet
from tests.integration.refusing import create, execute
from tests.run.soak import SOAK_SECONDS
from tests.servers.installed import Server, server_of
from tests.servers.packages import Package
from tests.tables.encoded_tables import (
    CHANGES,
    EUC_JP,
    LATIN1,
    LATIN5,
    SQL_ASCII,
    WIN1251,
    Encoded,
    copies,
    dump_ddl,
    hostile_settings,
    run,
    session,
)
from tests.tables.large_object_states import read_large_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAME = "mixed"
# The encodings of the two shards. The first shard has a standby that is also copied.
CASES = [(SQL_ASCII, LATIN1)]
if SOAK_SECONDS:
    CASES += [(LATIN1, SQL_ASCII), (EUC_JP, WIN1251), (WIN1251, EUC_JP), (LATIN5, EUC_JP)]
CROSSED_MIN, WAIT_SECONDS = 50, 0.05
NOT_DECODING, NEWEST = 15, 18
# After the full snapshot one is unlinked and one changed; the second shard has one more, with another owner.
LARGE_OBJECTS = (
    "SELECT lo_from_bytea(7, 'seven')", "SELECT lo_from_bytea(8, decode(repeat('00ff5c', 200000), 'hex'))",
    "COMMENT ON LARGE OBJECT 8 IS 'größe'",
)  # fmt: skip
MORE_OF_SECOND = (
    "CREATE ROLE keeper", "SELECT lo_from_bytea(4000000000, 'of the second')",
    "ALTER LARGE OBJECT 4000000000 OWNER TO keeper",
)  # fmt: skip
WHY = "PostgreSQL 15 can't decode WAL on a standby (16 and later can), so check has no copy of it"


@pytest.fixture(scope="module")
def other(build: Package | Path) -> Server:
    """The server of the second shard."""
    return server_of(build)


@pytest.fixture(scope="module")
def embedded(other: Server, mixed: EmbeddedFleet) -> EmbeddedFleet:
    """A shard of the wheel's version and one of the other version, each with a standby."""
    return mixed


def test_a_busy_bank_on_two_versions_is_consistent_at_every_cut(
    embedded: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    for shard, node in enumerate(fleet.primaries):
        create_database(embedded.node(node.id).dsn("postgres"), "bank", "UTF8")
        create_bank(node.dsn, shard=shard)
        execute(node.dsn, *LARGE_OBJECTS, *MORE_OF_SECOND * shard)
    await_standbys(embedded)
    large = [read_large_objects(node.dsn) for node in fleet.primaries]
    runs, target = Runs(fleet, Ready(spark)), target_fleet(fleet, "bank")
    with slots_dropped(fleet):
        runs.init()
        with BankWorkload([node.dsn for node in fleet.primaries], clients=4, pause_seconds=0.005) as bank:
            runs.full(NAME, large_objects=True)
            for node in fleet.primaries:
                execute(node.dsn, "SELECT lo_unlink(7)", "SELECT lo_put(8, 0, 'later')", "SELECT lo_create(9)")
            began = bank.committed
            while bank.committed.cross < began.cross + CROSSED_MIN:
                assert bank.wait(WAIT_SECONDS)
            runs.increment(NAME)
            bank.stop()
        runs.restore(NAME, target)
        assert read_invariants([node.dsn for node in target.primaries]).hold
        assert [read_large_objects(node.dsn) for node in target.primaries] == large
        report = runs.check_one(NAME)
        assert report.conflicts == []
        assert CROSSED_MIN <= report.compared.transactions <= bank.committed.cross
        assert report.large_objects == sum(map(len, large)) == 5


def test_a_name_that_is_not_valid_text_is_refused_and_shown(embedded: EmbeddedFleet, tmp_path: Path) -> None:
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    server = embedded.primaries[0].dsn("postgres")
    create_database(server, "unnamed", "SQL_ASCII")
    only = replace(fleet, nodes=(with_database(fleet.primaries[0], "unnamed"),))
    initialise(only, Silent())
    run(only.nodes[0].dsn, [b'CREATE TABLE "t\xff" ("c\xfe" int PRIMARY KEY)', 'CREATE TABLE "é" (id int)'.encode()])
    with pytest.raises(NodeUnfitError, match=r"node s1: .*column c\\xfe.*relation t\\xff") as raised:
        create(only, "refused")
    assert "é" not in raised.value.message
    # Roles belong to the whole server: renamed in this database, one has bytes that are not valid text in UTF-8.
    create_database(server, "readable", "UTF8")
    readable = replace(fleet, nodes=(with_database(fleet.primaries[0], "readable"),))
    run(
        readable.nodes[0].dsn,
        [b"CREATE ROLE plain", b"CREATE TABLE t (id int PRIMARY KEY)", b"GRANT ALL ON t TO plain"],
    )
    run(only.nodes[0].dsn, [b'ALTER ROLE plain RENAME TO "r\xfe"'])
    try:
        with pytest.raises(NodeUnfitError, match=r"node s1: names that can't be written in UTF-8: role r\\xfe$"):
            create(readable, "refused")
    finally:
        run(only.nodes[0].dsn, [b'ALTER ROLE "r\xfe" RENAME TO plain'])


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1", "EUC_JP", *["WIN1251", "UTF8"] * bool(SOAK_SECONDS)])
def test_a_role_whose_name_is_not_valid_text_is_refused_only_where_it_has_privileges(
    embedded: EmbeddedFleet, tmp_path: Path, encoding: str
) -> None:
    """Elsewhere it may have settings, own the database and have a prepared transaction: its name is shown."""
    server = embedded.primaries[0].dsn("postgres")
    create_database(server, "apart", encoding)
    fleet = configure_fleet(embedded, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    only = replace(fleet, nodes=(with_database(fleet.primaries[0], "apart"),))
    initialise(only, Silent())
    (node,) = only.nodes
    # These bytes are characters in LATIN1 only, so that statements to the database itself can't contain them.
    role = b'"r\x98\xff\\\'"'
    newest = b"(SELECT rolname FROM pg_roles ORDER BY oid DESC LIMIT 1)"
    create_database(server, "unnamed", "SQL_ASCII")
    elsewhere = with_database(node, "unnamed").dsn
    run(elsewhere, [b"CREATE ROLE %b" % role])
    try:
        setting = b"ALTER ROLE %b IN DATABASE apart SET work_mem = '1MB'" % role
        run(elsewhere, [setting, b"ALTER DATABASE apart OWNER TO %b" % role])
        run(node.dsn, [
            b"CREATE TABLE t (id int PRIMARY KEY)", b"SELECT set_config('session_authorization', %b, false)" % newest,
            b"BEGIN", b"SELECT pg_current_xact_id()", b"PREPARE TRANSACTION 'of the role'",
        ])  # fmt: skip
        preview_full(only, CreateRequest("seen"), Silent())
        named = "r\x98ÿ\\'" if encoding == "LATIN1" else r"r\x98\xff\'"
        with connect(node) as connection:
            properties = read_properties(node, connection)
            assert properties.owner == named
            assert DatabaseSetting("work_mem", "1MB", named) in properties.settings
            users = [one.user for one in prepared_transactions(node.id, connection)]
        assert users == [r"r\x98\xff\'" if encoding == "UTF8" else r"r\230\377\\'"]
        # Now the role has a privilege there.
        run(node.dsn, [b"DO $$BEGIN EXECUTE format('GRANT SELECT ON t TO %%I', %b); END$$" % newest])
        if encoding != "LATIN1":
            with pytest.raises(NodeUnfitError, match=r"can't be written in UTF-8: role r\\x98\\xff\\'$"):
                preview_full(only, CreateRequest("seen"), Silent())
    finally:
        with suppress(psycopg.errors.UndefinedObject):
            run(node.dsn, [b"ROLLBACK PREPARED 'of the role'"])
        run(elsewhere, [b"DROP DATABASE apart WITH (FORCE)", b"DROP ROLE %b" % role])


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(one.encoding for one in case))
def test_every_byte_of_every_encoding_comes_back_on_every_version(
    embedded: EmbeddedFleet, other: Server, spark: SparkSession, tmp_path: Path, case: tuple[Encoded, Encoded]
) -> None:
    fleet, version = create_fleet(embedded, tmp_path, case), other.major
    runs = Runs(fleet, Ready(spark))
    states = [[copies(node.dsn) for node in fleet.primaries]]
    dsns = [node.dsn for node in fleet.primaries]
    with targets_dropped(fleet), hostile_settings(*dsns), slots_dropped(fleet):
        runs.init()
        full = runs.full(NAME)
        assert full.left_out is not None
        expected = [LeftOut("s2", LeftOutKind.STANDBY_COPY, "s2-b1", WHY)] if version == NOT_DECODING else []
        assert [one for one in full.left_out if one.kind == LeftOutKind.STANDBY_COPY] == expected
        assert any("s2-b1 on s2" in line for line in create_lines(full)) == bool(expected)
        commits = []
        for number in range(len(CHANGES)):
            states.append(change(fleet, case, number))
            commits.append(runs.increment(NAME))
        # Two of each text over both shards, by gid and by tag, with other bytes on each; and one of each shard alone.
        assert commits[0].cut.global_transactions == 2 * len({one.text for one in case}) + 2
        assert any(one.kind == LeftOutKind.STANDBY_COPY for one in commits[-1].left_out or ()) == bool(expected)
        target = target_fleet(fleet, "same")
        for increment, state in enumerate(states):
            if increment == len(CHANGES) or SOAK_SECONDS:
                runs.restore(NAME, target, increment)
                assert [copies(node.dsn) for node in target.primaries] == state, f"increment {increment}"
        assert [dump_ddl(node.dsn) for node in target.primaries] == [dump_ddl(node.dsn) for node in fleet.primaries]
        newer = target_fleet(fleet, "newer", one_server=True)
        if case == CASES[0]:
            assert_roles_are_distinguished(runs, newer, case)
        else:
            runs.restore(NAME, newer, create_roles=True)
        assert [copies(node.dsn) for node in newer.primaries] == states[-1]
        if version < NEWEST:
            assert_older_is_refused(runs, target_fleet(fleet, "older"), version)
        assert_checked(runs, has_all=not expected)


def assert_roles_are_distinguished(runs: Runs, newer: Fleet, case: tuple[Encoded, Encoded]) -> None:
    """The second shard's role has other bytes than the first one's, even if both names are the same text."""
    second = f"r{case[1].text}"
    with pytest.raises(TargetUnfitError, match=f"node s2 lacks roles .*: {second}$") as raised:
        runs.restore(NAME, newer)
    assert f"in a database of encoding {case[1].encoding}" in raised.value.hint
    # The bank's may be there, too: a server's roles belong to no database.
    created = runs.restore(NAME, newer, create_roles=True).roles_created
    assert [role for role in created if role != "s2: keeper"] == [f"s2: {second}"]
    with session(newer.primaries[0].dsn) as connection:
        roles = {name for (name,) in connection.execute("SELECT rolname FROM pg_roles")}
    assert roles >= {b"r" + case[0].name, b"r" + case[1].name}


def assert_older_is_refused(runs: Runs, target: Fleet, version: int) -> None:
    first, second = target.primaries
    crossed = replace(target, nodes=(Node(first.id, second.dsn), Node(second.id, first.dsn)))
    with pytest.raises(TargetUnfitError, match=f"node s1: PostgreSQL {version} is older than the snapshot's {NEWEST}"):
        runs.restore(NAME, crossed)


def assert_checked(runs: Runs, *, has_all: bool) -> None:
    """Show, list and check name a copy that is left out, and check does not count it as compared."""
    report = runs.check_one(NAME)
    assert report.conflicts == []
    if has_all:
        assert (report.result, report.skipped) == ("valid", [])
        return
    assert [(one.what, one.why) for one in report.skipped] == [
        ("rows of shard s2", f"no backup copy to compare with; s2-b1: {WHY}")
    ]
    assert report.result == "inconclusive"
    assert report.compared.partitions > 0
    # The commands read the nodes from fleet.toml.
    dsns = iter(runs.fleet.nodes)
    text = re.sub(r"(?m)^dsn = .*$", lambda _: f"dsn = {json.dumps(next(dsns).dsn)}", runs.fleet.path.read_text())
    runs.fleet.path.write_text(text)
    for command in (["show", NAME], ["list"]):
        code, document = run_here(runs.fleet, *command)
        assert code == 0
        assert "s2-b1" in str(document)
