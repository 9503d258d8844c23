"""A small chain in a separate store, for a test to damage, and access to what it contains."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from cutline.check.report import CheckReport, Conflict
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.config import Fleet
from cutline.fleet.progress import Silent
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.proven_chains import commit_key, read_chain
from cutline.storage.location import StoreLocation
from tests.commands.snapshot_runs import Ready, Runs, configure_fleet, dropping_slots
from tests.integration.refusing import execute
from tests.stores.listed import objects_of

NAME = "chain"
ONLY_PRIMARIES = "primaries"
TRANSACTIONS = 60
# The long value is TOASTed and the last updates leave it out: without the base row, their images can't be completed.
WIDE_TABLE = """
CREATE TABLE wide (id int PRIMARY KEY, n int, a text);
ALTER TABLE wide ALTER a SET STORAGE EXTERNAL;
INSERT INTO wide SELECT i, 0, repeat(md5(i::text), 100) FROM generate_series(1, 5) AS i
"""


@dataclass(frozen=True, slots=True)
class StoredChain:
    """The chain as it was created, and a copy of its store that a test may damage."""

    chain: Chain
    fleet: Fleet
    store: Path
    spark: Ready

    def check(self, name: str | None = NAME, increment: int | None = None) -> CheckReport:
        return check_snapshots(self.fleet, CheckRequest(name, increment), self.spark, Silent())

    def conflicts(self) -> list[Conflict]:
        """Return the conflicts that a check finds; its exit code must report them."""
        report = self.check()
        assert report.exit_code == 1, report.to_json()
        return report.snapshots[0].conflicts

    def objects(self) -> list[str]:
        """Return every object that the chain lists."""
        return [key for commit in self.chain.commits for key in commit.object_sizes]

    def key_by_kind(self) -> dict[str, str]:
        """Return one object of every kind, commits included."""
        base = next(o.key for o in objects_of(self.chain.full) if o.kind == "base" and o.node == "s2")
        return {
            "base": base,
            "DDL": next(o.key for o in objects_of(self.chain.full) if o.kind == "archive" and o.node == "s1"),
            "segment of a primary": self.chain.increments[0].segments["s2"][0].key,
            "segment of a standby": self.chain.full.segments["s1-b1"][0].key,
            "full commit": commit_key(NAME, 0),
            "increment's commit": commit_key(NAME, 1),
        }

    def object_by_kind(self) -> dict[str, str]:
        """Return an object of every kind, each of another node or section where there are several."""
        full, increment = self.chain.full, self.chain.increments[0]
        return {
            "base": next(one.key for one in objects_of(self.chain.full) if one.kind == "base" and one.node == "s2"),
            "DDL": next(one.key for one in objects_of(full) if one.kind == "archive" and one.node == "s1"),
            "other DDL": next(one.key for one in objects_of(full) if one.kind == "archive" and one.node == "s2"),
            "segment": full.segments["s1-b1"][0].key,
            "segment of an increment": increment.segments["s1"][0].key,
        }


@contextmanager
def stored_chain(servers: EmbeddedFleet, directory: Path, spark: Ready) -> Iterator[StoredChain]:
    """Create a full snapshot and an increment of a busy bank, and a snapshot without standbys."""
    fleet = configure_fleet(servers, directory / "fleet.toml", f"file://{directory}/store")
    runs = Runs(fleet, spark)
    first = servers.dsns()[0]
    try:
        execute(first, WIDE_TABLE)
        with dropping_slots(fleet):
            runs.init()
            names = [primary.id for primary in servers.primaries]
            with BankWorkload(servers.dsns(), clients=2, pause_seconds=0.005, names=names) as bank:
                runs.full(NAME)
                while bank.committed.total < TRANSACTIONS:
                    assert bank.wait(0.05)
                execute(first, "UPDATE wide SET n = 1 WHERE id < 4")
                runs.increment(NAME)
                runs.full(ONLY_PRIMARIES, only_primary=True)
            # The slots stay until the end, as tests also attempt the next increment on a damaged store.
            yield StoredChain(read_chain(fleet.store.open(), NAME), fleet, directory / "store", runs.spark)
    finally:
        execute(first, "DROP TABLE IF EXISTS wide")


def copy_store(original: StoredChain, directory: Path) -> StoredChain:
    """Return the chain with a copy of its store in `directory`, for one test to damage."""
    store, path = directory / "store", directory / "fleet.toml"
    shutil.copytree(original.store, store)
    path.write_text(original.fleet.path.read_text().replace(str(original.store), str(store)))
    return replace(
        original, fleet=replace(original.fleet, path=path, store=StoreLocation(f"file://{store}")), store=store
    )


def group_number(stored: StoredChain, table: str) -> int:
    return next(group.number for group in stored.chain.groups("s1") if group.table == table)


def row_of(stored: StoredChain, table: pa.Table, name: str, without: Collection[bytes] = ()) -> int:
    """Return the first row or change of the bank's table `name` whose key is not among `without`."""
    number = group_number(stored, name)
    rows = zip(table["group"].to_pylist(), table["key"].to_pylist(), strict=True)
    return next(row for row, (group, key) in enumerate(rows) if group == number and key not in without)


def changed_keys(stored: StoredChain, node: str) -> set[bytes]:
    tables = [pq.read_table(stored.store / one.key) for one in stored.chain.segments(node)]
    return {key for table in tables for key in table["key"].to_pylist()}


def is_shared(stored: StoredChain, event: dict[str, object]) -> bool:
    """Return whether the other primary has prepared the transaction too."""
    tables = [pq.read_table(stored.store / one.key) for one in stored.chain.segments("s1")]
    return any(event["global_id"] in table["global_id"].to_pylist() for table in tables)
