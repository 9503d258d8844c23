"""Global ids on real servers: gids as the JDBC driver, Citus and applications form them, and tagged commits.

A global transaction that one shard has committed while the other has it prepared is included on both. One that no shard
has committed is included on neither, and in a later increment if it commits. The short form tests one rule that the
seed draws, and the regular expression, which the tagged commits need; the long form (CUTLINE_SOAK) tests all rules.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet, Node, load_fleet
from cutline.wal.cut.cut_values import NodeCut
from tests.commands.snapshot_runs import Ready, Runs, dropping_slots, sorted_copies
from tests.integration.refusing import execute
from tests.integration.wal_place import Place, await_database, create_one_table, place
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["place"]  # the fixture

NAME, SOURCE, RESTORED = "gids", "gids", "gids_restored"
TABLE = "CREATE TABLE part (id integer PRIMARY KEY, note text)"
# The transactions of a test. Each part inserts a row with this id.
AHEAD_ON_1, AHEAD_ON_2, UNDECIDED, ROLLED_BACK = 1, 2, 3, 4
Gids = Callable[[int, int], str]


def exact(transaction: int, shard: int) -> str:
    return f"order-{transaction}"


def regex(transaction: int, shard: int) -> str:
    return f"order-{transaction}/s{shard}"


def xa(transaction: int, shard: int) -> str:
    """The longest Xid, with a negative format, as the JDBC driver's RecoveredXid.xidToString prints it."""
    text = b"\xfb\xff\xfe" * 21
    branch = base64.b64encode(text + bytes([shard])).decode()
    gid = f"{-(2**31)}_{base64.b64encode(text + bytes([transaction])).decode()}_{branch}"
    assert {"+", "/", "="} < set(gid), "the gid lacks a special character of base64"
    return gid


def citus(transaction: int, shard: int) -> str:
    """As Citus prints "citus_%u_%u_%lu_%u": two groups with the same process id, and the largest numbers."""
    group, number = divmod(transaction, 2)
    return f"citus_{group}_4194304_{2**64 - 1 - number}_{2**32 - 1 - shard}"


FORMS: dict[str, tuple[str, Gids]] = {
    "exact": ("exact", exact),
    "xa": ("xa", xa),
    "citus": ("citus", citus),
    "regex": (r"^(?P<global>order-\d+)/", regex),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two shards with one table each, the commands on them, and a target fleet of the same shape."""

    runs: Runs
    target: Fleet
    shards: dict[int, str]

    def run_part(self, transaction: int, shard: int, gid: str | None, *statements: str) -> None:
        """Run one part of a transaction; prepare it, or commit it if there is no gid."""
        end = f"PREPARE TRANSACTION '{gid}'" if gid else "COMMIT"
        execute(self.shards[shard], f"BEGIN; INSERT INTO part VALUES ({transaction}, 'x')", *statements, end)

    def resolve(self, word: str, shard: int, gid: str) -> None:
        execute(self.shards[shard], f"{word} PREPARED '{gid}'")

    def restore(self, increment: int) -> list[list[int]]:
        """Restore an increment; return the ids of the parts on every shard."""
        self.runs.restore(NAME, self.target, increment)
        return [ids(node.dsn) for node in self.target.primaries]

    def check_torn(self, increment: int) -> tuple[int, list[str | None]]:
        """Check an increment; return the number of global transactions compared, and which of them are torn."""
        report = self.runs.check_one(NAME, increment)
        assert {conflict.kind for conflict in report.conflicts} <= {"transaction"}
        return report.compared.transactions, [conflict.global_id for conflict in report.conflicts]


def ids(dsn: str) -> list[int]:
    with psycopg.connect(dsn) as connection:
        return [row[0] for row in connection.execute("SELECT id FROM part ORDER BY id")]


def prepared_on(dsn: str) -> list[str]:
    with psycopg.connect(dsn) as connection:
        query = "SELECT gid FROM pg_prepared_xacts WHERE database = current_database()"
        return [gid for (gid,) in connection.execute(query)]


def in_doubt_on(cut: NodeCut) -> dict[str, bool]:
    """The gids that a cut lists as prepared on the node, and whether they are included."""
    return {one.gid: one.is_included for one in cut.in_doubt if one.is_prepared}


@contextmanager
def pair(
    embedded: EmbeddedFleet, spark: SparkSession, folder: Path, form: str, *, backups: bool = False
) -> Iterator[Pair]:
    """Create a database on each of two shards, as an initialised fleet with the rule `form`."""
    nodes = [node for node in embedded.nodes if backups or node.backup_of is None]
    primaries = [node for node in nodes if node.backup_of is None]
    try:
        for node in primaries:
            execute(node.dsn("postgres"), f"CREATE DATABASE {SOURCE}")
            execute(node.dsn(SOURCE), TABLE)
        for node in nodes:
            await_database(Node(node.id, node.dsn(SOURCE)))
        fleets = []
        for database, chosen in ((SOURCE, nodes), (RESTORED, primaries)):
            text = f"name = 'gids'\nstore = 'file://{folder}/store'\n[cut]\nglobal_id = '{form}'\n"
            for node in chosen:
                text += f"[[node]]\nid = '{node.id}'\ndsn = '{node.dsn(database)}'\n"
                text += f"backup_of = '{node.backup_of}'\n" if node.backup_of else ""
            path = folder / f"{database}.toml"
            path.write_text(text)
            fleets.append(load_fleet(path))
        with dropping_slots(fleets[0]):
            runs = Runs(fleets[0], Ready(spark))
            runs.init()
            yield Pair(runs, fleets[1], {shard: node.dsn(SOURCE) for shard, node in enumerate(primaries, 1)})
    finally:
        for node in primaries:
            drop_databases(node)


def drop_databases(node: EmbeddedNode) -> None:
    """Drop the databases of a pair, including those that a restore renamed."""
    with psycopg.connect(node.dsn("postgres"), autocommit=True) as connection:
        query = "SELECT datname FROM pg_database WHERE datname LIKE 'gids%'"
        for (name,) in connection.execute(query).fetchall():
            prepared = connection.execute("SELECT gid FROM pg_prepared_xacts WHERE database = %s", [name]).fetchall()
            for (gid,) in prepared:
                execute(node.dsn(name), f"ROLLBACK PREPARED '{gid}'")
            connection.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())


@pytest.mark.parametrize("form", first(FORMS))
def test_a_transaction_committed_on_one_shard_only_is_included_on_both(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path, form: str
) -> None:
    rule, gid = FORMS[form]
    with pair(shared_fleet, spark, tmp_path, rule) as two:
        two.runs.full(NAME)
        ahead = {gid(one, shard) for one in (AHEAD_ON_1, AHEAD_ON_2) for shard in (1, 2)}
        for transaction in (AHEAD_ON_1, AHEAD_ON_2, UNDECIDED, ROLLED_BACK):
            for shard in (1, 2):
                two.run_part(transaction, shard, gid(transaction, shard))
        two.resolve("COMMIT", 1, gid(AHEAD_ON_1, 1))
        two.resolve("COMMIT", 2, gid(AHEAD_ON_2, 2))
        cut = two.runs.increment(NAME).cut
        assert [ids(dsn) for dsn in two.shards.values()] == [[AHEAD_ON_1], [AHEAD_ON_2]]
        for shard, found in enumerate(cut.nodes, 1):
            assert in_doubt_on(found) == {one: one in ahead for one in prepared_on(two.shards[shard])}
        two.resolve("COMMIT", 2, gid(AHEAD_ON_1, 2))
        two.resolve("COMMIT", 1, gid(AHEAD_ON_2, 1))
        for shard in (1, 2):
            two.resolve("COMMIT", shard, gid(UNDECIDED, shard))
            two.resolve("ROLLBACK", shard, gid(ROLLED_BACK, shard))
        two.runs.increment(NAME)

        assert two.restore(1) == [[AHEAD_ON_1, AHEAD_ON_2]] * 2
        assert two.restore(2) == [[AHEAD_ON_1, AHEAD_ON_2, UNDECIDED]] * 2
        for node, source in zip(two.target.primaries, two.shards.values(), strict=True):
            assert sorted_copies(node.dsn) == sorted_copies(source)
        assert two.check_torn(1) == (4, [])


def test_without_its_rule_every_branch_is_a_separate_transaction(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    """Why the rule must be configured: with `exact`, the parts of an XA transaction are unrelated transactions."""
    with pair(shared_fleet, spark, tmp_path, "exact") as two:
        two.runs.full(NAME)
        for transaction in (AHEAD_ON_1, AHEAD_ON_2):
            for shard in (1, 2):
                two.run_part(transaction, shard, xa(transaction, shard))
        two.resolve("COMMIT", 1, xa(AHEAD_ON_1, 1))
        two.resolve("COMMIT", 2, xa(AHEAD_ON_2, 2))
        two.runs.increment(NAME)
        assert two.restore(1) == [[AHEAD_ON_1], [AHEAD_ON_2]]
        # A check can't find them torn, either.
        assert two.check_torn(1) == (0, [])


def tag(gid: str, prefix: str = "snapshot.gid") -> str:
    return f"SELECT pg_logical_emit_message(true, '{prefix}', '{gid}')"


def test_a_tagged_one_phase_commit_includes_the_prepared_parts(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path: Path
) -> None:
    tagged, untagged, undecided = 1, 2, 3
    with pair(shared_fleet, spark, tmp_path, FORMS["regex"][0], backups=True) as two:
        two.runs.full(NAME)
        for transaction in (tagged, untagged, undecided):
            two.run_part(transaction, 2, regex(transaction, 2))
        # Shard 1 is the coordinator. Tags that are rolled back to a savepoint do not count; of the rest the last does.
        two.run_part(
            tagged, 1, None,
            tag("order-7/1"), tag(regex(tagged, 1)), "SAVEPOINT s", tag("order-8/1"), "ROLLBACK TO s",
            tag("order-9/1", prefix="application"),
        )  # fmt: skip
        two.run_part(untagged, 1, None)
        coordinator, other = two.runs.increment(NAME).cut.nodes
        assert in_doubt_on(other) == {regex(tagged, 2): True, regex(untagged, 2): False, regex(undecided, 2): False}
        (committed,) = coordinator.in_doubt
        assert (committed.global_id, committed.is_prepared, committed.is_included) == (f"order-{tagged}", False, True)
        two.resolve("COMMIT", 2, regex(tagged, 2))
        two.resolve("COMMIT", 2, regex(untagged, 2))
        two.run_part(undecided, 1, None, tag(regex(undecided, 1)))
        two.runs.increment(NAME)

        assert two.restore(1) == [[tagged, untagged], [tagged]], "without a tag the parts are unrelated"
        assert two.restore(2) == [[tagged, untagged, undecided]] * 2
        for increment, transactions in ((1, 1), (2, 2)):
            report = two.runs.check_one(NAME, increment)
            # Standbys decode the same tags.
            assert (report.result, report.conflicts, report.skipped) == ("valid", [], [])
            assert report.compared.transactions == transactions


@pytest.mark.parametrize("where", ["primary", "standby"])
def test_a_tag_is_kept_over_all_batches_of_a_transaction(place: Place, where: str) -> None:
    follower = place.follow(create_one_table(place), standby=where == "standby")
    wide = "INSERT INTO t SELECT n, repeat('x', 4000000) FROM generate_series({}, {}) n"
    with psycopg.connect(place.primary.dsn) as connection:
        connection.execute("SELECT pg_logical_emit_message(true, 'snapshot.gid', 'first')")
        connection.execute(wide.format(1, 6).encode())
        connection.execute("SELECT pg_logical_emit_message(true, 'snapshot.gid', 'second ü')")
        connection.execute(wide.format(7, 12).encode())
    place.connection.execute(
        "BEGIN; INSERT INTO t VALUES (13); SELECT pg_logical_emit_message(true, 'snapshot.gid', 'no')"
    )
    place.connection.execute("PREPARE TRANSACTION 'its own'")
    place.connection.execute("COMMIT PREPARED 'its own'")
    place.connection.execute("INSERT INTO t VALUES (14); SELECT pg_logical_emit_message(false, 'snapshot.gid', 'no')")
    follower.drain_fully(place.write_finish())
    found = [(chr(event["op"]), event["global_id"]) for event in follower.events() if chr(event["op"]) != "M"]
    assert found == [("C", "second ü"), ("P", "its own"), ("K", "its own"), ("C", None)]
