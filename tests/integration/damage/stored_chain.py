"""A small chain in a folder of its own, for a test to damage, and what stands in it."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from check.report import CheckReport, Conflict
from check.verify import CheckRequest, check_snapshots
from embedded.bank_workload import BankWorkload
from embedded.fleet import EmbeddedFleet
from fleet.config import Fleet
from fleet.progress import Silent
from snapshots.records.chain import Chain
from snapshots.records.commits import commit_key, read_chain
from storage.location import StoreLocation
from tests.integration.refusing import execute
from tests.snapshot_runs import Ready, Runs, chains_dropped, described

NAME = "chain"
ONLY_PRIMARIES = "primaries"
TRANSACTIONS = 60
# Its long value is TOASTed, and its last updates leave that out: without its base row it can't be completed.
WIDE_TABLE = """
CREATE TABLE wide (id int PRIMARY KEY, n int, a text);
ALTER TABLE wide ALTER a SET STORAGE EXTERNAL;
INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 5) AS i
"""


@dataclass(frozen=True, slots=True)
class Stored:
    """The chain as it was made, and a copy of its store that a test may damage."""

    chain: Chain
    fleet: Fleet
    store: Path
    spark: Ready

    def check(self, name: str | None = NAME, increment: int | None = None) -> CheckReport:
        return check_snapshots(self.fleet, CheckRequest(name, increment), self.spark, Silent())

    def conflicts(self) -> list[Conflict]:
        """What a check finds wrong; it must say so by its exit code."""
        report = self.check()
        assert report.exit_code == 1, report.to_json()
        return report.snapshots[0].conflicts

    def objects(self) -> list[str]:
        """Every object that the chain lists."""
        return [key for commit in self.chain.commits for key in commit.object_sizes]

    def kinds(self) -> dict[str, str]:
        """One object of every kind, commits included."""
        base = next(o.key for o in self.chain.full.objects if o.kind == "base" and o.node == "s2")
        return {
            "base": base,
            "DDL": next(o.key for o in self.chain.full.objects if o.kind == "post-data"),
            "segment of a primary": self.chain.increments[0].segments["s2"][0].key,
            "segment of a standby": self.chain.full.segments["s1-b1"][0].key,
            "full commit": commit_key(NAME, 0),
            "increment's commit": commit_key(NAME, 1),
        }

    def every_kind(self) -> dict[str, str]:
        """An object of every kind, each of another node or section where there are several."""
        full, increment = self.chain.full, self.chain.increments[0]
        return {
            "base": next(one.key for one in self.chain.full.objects if one.kind == "base" and one.node == "s2"),
            "pre-data": next(one.key for one in self.chain.full.objects if one.kind == "pre-data"),
            "post-data": next(one.key for one in self.chain.full.objects if one.kind == "post-data"),
            "segment": full.segments["s1-b1"][0].key,
            "segment of an increment": increment.segments["s1"][0].key,
        }


@contextmanager
def stored_chain(servers: EmbeddedFleet, directory: Path, spark: Ready) -> Iterator[Stored]:
    """A full snapshot and an increment of a bank, and a snapshot without standbys."""
    fleet = described(servers, directory / "fleet.toml", f"file://{directory}/store")
    runs = Runs(fleet, spark)
    first = servers.dsns()[0]
    try:
        execute(first, WIDE_TABLE)
        with chains_dropped(fleet):
            runs.init()
            with BankWorkload(servers.dsns(), clients=2, pause_seconds=0.005) as bank:
                runs.full(NAME)
                while bank.committed.total < TRANSACTIONS:
                    assert bank.wait(0.05)
                execute(first, "UPDATE wide SET n = 1 WHERE id < 4")
                runs.increment(NAME)
                runs.full(ONLY_PRIMARIES, only_primary=True)
            # With its slots: what the next increment says of a damaged store is asked, too.
            yield Stored(read_chain(fleet.store.open(), NAME), fleet, directory / "store", runs.spark)
    finally:
        execute(first, "DROP TABLE IF EXISTS wide")


def copied(made: Stored, directory: Path) -> Stored:
    """The chain with a copy of its store in `directory`, for one test to damage."""
    store, path = directory / "store", directory / "fleet.toml"
    shutil.copytree(made.store, store)
    path.write_text(made.fleet.path.read_text().replace(str(made.store), str(store)))
    return replace(made, fleet=replace(made.fleet, path=path, store=StoreLocation(f"file://{store}")), store=store)


def group_number(stored: Stored, table: str) -> int:
    return next(group.number for group in stored.chain.groups("s1") if group.table == table)


def row_of(stored: Stored, table: pa.Table, name: str, without: Collection[bytes] = ()) -> int:
    """The first row or change of table `name` of the bank that has none of some keys."""
    number = group_number(stored, name)
    rows = zip(table["group"].to_pylist(), table["key"].to_pylist(), strict=True)
    return next(row for row, (group, key) in enumerate(rows) if group == number and key not in without)


def changed_keys(stored: Stored, node: str) -> set[bytes]:
    tables = [pq.read_table(stored.store / one.key) for one in stored.chain.segments(node)]
    return {key for table in tables for key in table["key"].to_pylist()}


def is_shared(stored: Stored, event: dict[str, object]) -> bool:
    """Whether the other primary has prepared the transaction too."""
    tables = [pq.read_table(stored.store / one.key) for one in stored.chain.segments("s1")]
    return any(event["global_id"] in table["global_id"].to_pylist() for table in tables)
