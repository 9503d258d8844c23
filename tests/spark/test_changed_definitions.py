"""A chain whose tables changed their definitions, read at each of its cuts; the expected states are written by hand.

One shard and its standby, whose base copies of a table that was copied again are from different positions.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import cutline.check.verify
from cutline.check.definitions import StoredDefinitions
from cutline.check.new_part import NewPart
from cutline.check.report import Conflict, Findings, SnapshotReport
from cutline.check.rereading import Deadline
from cutline.check.resting import ChainCheck
from cutline.check.verify import check_contents
from cutline.fleet.progress import Silent
from cutline.snapshots.fold.fold import fold
from cutline.snapshots.fold.sources import sources_of
from cutline.snapshots.records.chain import Chain
from cutline.storage.clock import utc_now
from cutline.storage.location import StoreLocation
from cutline.storage.open import open_store
from tests.chains.folded_rows import driver_folds, rows_at_cut, spark_folds
from tests.chains.redefined_chain import COPIED, NODES, STATES, AlterChanges, Change, build_chain
from tests.run.soak import first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def read_states(spark: SparkSession, chain: Chain, url: str) -> dict[str, dict[str, list[str]]]:
    """Return every node's rows at the chain's last commit by table, as a restore reads them."""
    store = open_store(url, {})
    sources = sources_of(chain, NODES, store)
    folded = fold(spark, sources, StoreLocation(url))
    names = {one.number: one.table for one in chain.groups("a")}
    found: dict[str, dict[str, list[str]]] = {node: {name: [] for name in names.values()} for node in NODES}
    try:
        rows = rows_at_cut(folded, sources, StoreLocation(url))
    finally:
        folded.release()
    for node, number, line in rows.elements():
        assert line.endswith(b"\n")
        found[NODES[node]][names[number]].append(line[:-1].decode())
    return {node: {name: sorted(lines) for name, lines in tables.items()} for node, tables in found.items()}


@pytest.mark.parametrize("increment", first([1, 2, 0], 2))
def test_a_state_has_the_rows_and_the_columns_of_its_cut(spark: SparkSession, tmp_path: Path, increment: int) -> None:
    url = f"file://{tmp_path}"
    chain = build_chain(open_store(url, {})).up_to(increment)
    for folding in (spark_folds, driver_folds):
        with folding():
            assert read_states(spark, chain, url) == dict.fromkeys(NODES, STATES[increment])


class Started:
    """A Spark session that runs already."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def is_small(self) -> bool:
        return False

    def begin(self, *_: object) -> None:
        """Do nothing: it runs already."""

    def session(self) -> SparkSession:
        return self._spark


def find_conflicts(
    spark: SparkSession, folder: Path, alter_changes: AlterChanges, after: int | None = None
) -> list[Conflict]:
    """Return the conflicts that a check of the chain finds, except for missing markers, and cuts that none made.

    With `after`, only what is new since that increment is checked.
    """
    url = f"file://{folder}"
    store = open_store(url, {})
    findings = Findings(SnapshotReport("daily", 2))
    chain = build_chain(store, alter_changes)
    part = NewPart(chain, after)
    check = ChainCheck(
        chain, StoreLocation(url), findings, Started(spark), Silent(), Deadline(None), None, utc_now(), "", 1.0, {}
    )
    check_contents(check, part, StoredDefinitions())
    return [one for one in findings.report.conflicts if one.kind not in ("marker", "cut")]


def test_copies_are_equal_despite_other_copy_positions_and_stored_definitions(
    spark: SparkSession, tmp_path: Path
) -> None:
    # On one copy only: changes that a failed attempt stored, changes decoded before a table was copied, and a change
    # of a dropped table. Other changes were stored by an attempt that knew another definition.
    lacking = (145, 172, 173, 211, 245)
    otherwise = {135: (12, "t3\tz\tinfo"), 210: (21, "3\t\\u\t41\tmail3"), 220: (26, "3\tbefore the last truncate")}

    def alter_changes(node: str, number: int, changes: list[Change]) -> list[Change]:
        if node == "a":
            return changes
        found = [
            (at, *otherwise.get(at, (of, line)), op, key) for at, of, op, key, line in changes if at not in lacking
        ]
        return [(at, of, op, key, line) for at, of, line, op, key in found]

    assert find_conflicts(spark, tmp_path / "all", alter_changes) == []
    assert find_conflicts(spark, tmp_path / "new", alter_changes, after=1) == []


def test_differences_between_copies_in_converted_rows_are_found(spark: SparkSession, tmp_path: Path) -> None:
    # The standby has another name in the row of person that was last changed under the first definition, lacks a line
    # of log, and has another change of a table that was copied again, after both copies, which a later change hides.
    instead = {
        111: [(111, 1, "U", "4", "4\tdora\tother")],
        135: [],
        170: [(170, 14, "U", "2", "2\thidden\tw2")],
    }  # fmt: skip

    def alter_changes(node: str, number: int, changes: list[Change]) -> list[Change]:
        return [new for one in changes for new in (instead.get(one[0], [one]) if node == "b" else [one])]

    found = find_conflicts(spark, tmp_path, alter_changes)
    assert {(one.node, one.other_node) for one in found} == {("a", "b")}
    assert sorted((one.group, one.kind) for one in found) == [
        ("s.log", "changes"), ("s.log", "row-count"), ("s.person", "changes"), ("s.person", "row-hash"),
        ("s.swapped", "changes"),
    ]  # fmt: skip


@pytest.mark.parametrize("held_bytes_max", first([1 << 24, 0]))
def test_differences_in_what_is_new_are_found_by_reading_only_that(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held_bytes_max: int
) -> None:
    # Since increment 1, the standby has another row of a table that was copied again before, lacks a row of one that
    # was copied since, and has another row in the copy of that one. A difference before increment 1 is not seen.
    monkeypatch.setattr(cutline.check.verify, "STORED_BYTES_MAX", held_bytes_max)
    instead = {
        111: [(111, 1, "U", "4", "4\tdora\tother")],
        260: [],
        271: [(271, 24, "U", "3", "3\tother\tw3\tm3")],
    }  # fmt: skip

    def alter_changes(node: str, number: int, changes: list[Change]) -> list[Change]:
        return [new for one in changes for new in (instead.get(one[0], [one]) if node == "b" else [one])]

    found = find_conflicts(spark, tmp_path / "changes", alter_changes, after=1)
    assert sorted((one.group, one.kind) for one in found) == [
        ("s.new", "changes"), ("s.new", "row-count"), ("s.swapped", "changes"),
    ]  # fmt: skip
    monkeypatch.setitem(COPIED["b"], 28, (255, ["1\tanother"]))
    found = find_conflicts(spark, tmp_path / "copy", lambda node, number, changes: changes, after=1)
    assert [(one.group, one.kind) for one in found] == [("s.new", "row-hash")]
