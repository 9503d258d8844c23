"""A check hashes the rows at a cut by what tasks reported of the segments, and by what base rows have of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from cutline.check.base_hashes import BaseHashTask, NodeBase, hash_base
from cutline.check.copies import Copies
from cutline.check.hashing import combine_all, combine_hashes
from cutline.check.last_changes import LastChanges, last_tasks
from cutline.check.reported_changes import Reported, hash_reported
from cutline.check.table_forms import TableForms
from cutline.columns.bytes_column import from_list, xxhash64
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.snapshots.fold.sources import Sources, read_tables
from cutline.snapshots.records.chain import Chain
from cutline.spark.task_processes import InDriver
from cutline.storage.location import StoreLocation
from cutline.wal.segments.segments import DELETE, INSERT, PARTIAL, SEGMENT_SCHEMA, UPSERT
from tests.chains.drawn_history import KEYED, LINES, NODES, State, store_history
from tests.chains.folded_rows import segments_fold, session_without_spark
from tests.run.soak import SEED
from tests.unit.made_commits import commit, counted
from tests.unit.test_local_fold import Change, Row, store_chain

HISTORIES = 18
Hashes = Mapping[tuple[int, ...], tuple[int, ...]]


SESSION = session_without_spark()


@pytest.fixture(autouse=True)
def fold_by_segment() -> Iterator[None]:
    with segments_fold():
        yield


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    """Two copies of one shard, which have the same WAL from position 200 on."""
    monkeypatch.setattr(Copies, "since", lambda _self, _node: Lsn(200))
    monkeypatch.setattr(Copies, "recopied_since", lambda _self, _node: {})
    return Copies(NODES, dict.fromkeys(NODES, NODES[0]), Chain(counted(commit(0))))


def table(number: int, key_width: int, columns: int) -> Group:
    return Group(
        number, "public", f"t{number}", "full" if key_width == 0 else "default", key_width,
        tuple(Column(f"c{at}", "text", 25, -1, at) for at in range(columns)),
    )  # fmt: skip


# As tests/chains/drawn_history.py stores them, and tests/unit/test_local_fold.py.
DRAWN = InDriver(TableForms.of([table(KEYED, 1, 3), table(LINES, 0, 2)]))
OF_LINES = InDriver(TableForms.of([table(KEYED, 1, 3), table(LINES, 0, 1)]))


def reports_of(sources: Sources, location: StoreLocation) -> dict[str, bytes | None]:
    """What the tasks of a check report of the segments."""
    reports: dict[str, bytes | None] = {}
    for key, task in last_tasks(sources).items():
        last = LastChanges(task)
        for table in read_tables(location.open(), task.segment.source, SEGMENT_SCHEMA):
            last.add(table)
        reports[key] = last.report()
    return reports


def reported_of(sources: Sources, location: StoreLocation, copies: Copies, forms: InDriver) -> tuple[Reported, Hashes]:
    """Hash all rows as a check does; return also the combined hashes."""
    reported = hash_reported(SESSION, sources, copies, reports_of(sources, location), location)
    assert reported is not None
    parts = []
    for base in sources.bases:
        number = base.source.number
        awaited = {group: one.images for (node, group), one in reported.awaited.items() if node == number}
        changed, removed = reported.changed.get(number), any(node == number for node, _ in reported.removed)
        one = NodeBase(
            base, InDriver(changed) if changed else None, counts_lines=removed,
            anchored=InDriver(awaited) if awaited else None,
        )  # fmt: skip
        is_compared = number not in copies.alone
        (report,) = hash_base(BaseHashTask((one,), forms, location, is_compared=is_compared))
        assert report.problem is None, report.problem
        assert report.sums is not None
        parts.append(report.sums)
        reported.add_base(number, report.matches, report.completed)
    reported.end()
    return reported, combine_all([*parts, *reported.rows], 3).as_dict()


def sums_of(rows: State) -> Hashes:
    """The hashes of all rows; the first field of a row with a key is the key."""
    lines = list(rows.elements())
    places = np.array([(node, group, 0) for node, group, _ in lines], np.int64)
    keys = [line.rstrip(b"\n").partition(b"\t")[0] if group % 10 == KEYED else b"" for _, group, line in lines]
    hashes = xxhash64(from_list([line for *_, line in lines]), xxhash64(from_list(keys)))
    return combine_hashes(places, hashes).as_dict()


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("number", range(HISTORIES))
def test_a_check_hashes_the_rows_that_the_tables_had(
    tmp_path: Path, number: int, copies: Copies, *, is_whole: bool
) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources, expected = store_history(location.open(), SEED + number, is_whole=is_whole, has_long_lines=False)
    reported, found = reported_of(sources, location, copies, DRAWN)
    assert reported.lacking == {}
    assert found == sums_of(expected)
    # Of a copy that is compared with no other, nothing is hashed, but it is known what is missing.
    alone = replace(copies, shard={node: node for node in NODES})
    assert reported_of(sources, location, alone, DRAWN)[0].lacking == {}


BASE: list[Row] = [
    *((KEYED, key, key + b"\told\tkept\n") for key in (b"1", b"2")), *[(LINES, b"", b"x\n")] * 3, (LINES, b"", b"y\n"),
]  # fmt: skip
CHANGES: list[list[Change]] = [
    [
        (KEYED, PARTIAL, b"1", b"1\tnew\t\\u\n"),
        (KEYED, INSERT, b"3", b"3\tinserted\tlarge\n"),
        (LINES, DELETE, b"", b"x\n"),
    ],
    [
        (KEYED, PARTIAL, b"3", b"3\tupdated\t\\u\n"),
        (KEYED, UPSERT, b"2", b"2\tall\tnew\n"),
        (LINES, INSERT, b"", b"z\n"),
    ],
]


def test_every_kind_of_change_is_hashed(tmp_path: Path, copies: Copies) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    sources = store_chain(tmp_path, BASE, *CHANGES)
    keyed = (b"1\tnew\tkept\n", b"2\tall\tnew\n", b"3\tupdated\tlarge\n")
    lines = (b"x\n", b"x\n", b"y\n", b"z\n")
    rows = Counter([*((0, KEYED, row) for row in keyed), *((0, LINES, row) for row in lines)])
    reported, found = reported_of(sources, location, copies, OF_LINES)
    assert (found, reported.lacking) == (sums_of(rows), {})


@pytest.mark.parametrize("is_alone", [False, True])
def test_what_is_missing_is_counted(tmp_path: Path, copies: Copies, *, is_alone: bool) -> None:
    location = StoreLocation(f"file://{tmp_path}")
    shard = {NODES[0]: NODES[0]} if is_alone else {node: NODES[0] for node in NODES}
    lost: list[Change] = [
        (LINES, DELETE, b"", b"never\n"),
        (LINES, DELETE, b"", b"y\n"),
        (LINES, DELETE, b"", b"y\n"),
        (KEYED, PARTIAL, b"9", b"9\tnew\t\\u\n"),
        (KEYED, DELETE, b"2", b""),
        (KEYED, PARTIAL, b"2", b"2\tnew\t\\u\n"),
    ]
    sources = store_chain(tmp_path, BASE, *CHANGES, lost)
    reported, _ = reported_of(sources, location, replace(copies, nodes=tuple(shard), shard=shard), OF_LINES)
    assert reported.lacking == {(0, LINES): 2, (0, KEYED): 2}
