"""TRUNCATEs that the file of their table contradicts, in a chain of a few cuts."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from msgspec import structs

from cutline.check.copies import Copies
from cutline.check.deleted_rows import KeyDeletes
from cutline.check.report import Findings, SnapshotReport
from cutline.check.truncates import WAITS, note_contradicted
from cutline.fleet.lsn import Lsn
from cutline.nodes.groups import Column, Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import CutRecord, DefinitionChanges
from tests.unit.made_commits import full_commit, increment_commit

TABLE = Group(3, "public", "t", "default", 1, (Column("id", "bigint", 20, -1, 1),))
WHAT = "the archive contains a TRUNCATE at 0/96, but the table kept its file"


def state(file: int, name: str = "public.t", oid: int = 7) -> TableState:
    return TableState(name, oid, "1", "1", file, 1, "1.1", (), None)


def chain_of(*files: int) -> Chain:
    """A chain with these files of the table at its commits, whose cuts end at 100, 200, and so on."""
    full = structs.replace(full_commit(position=90), groups={"a": (TABLE,)}, tables={"a": (state(files[0]),)})
    full = structs.replace(full, cut=ending(full.cut, 100))
    increments = []
    for number, (before, now) in enumerate(pairwise(files), start=1):
        one = increment_commit(number, position=100 * number + 90)
        changes = DefinitionChanges(tables={"a": (state(now),)}) if before != now else None
        increments.append(structs.replace(one, cut=ending(one.cut, 100 * number + 100), definition_changes=changes))
    return Chain(full, tuple(increments))


def ending(cut: CutRecord, finish: int) -> CutRecord:
    return structs.replace(cut, nodes=tuple(structs.replace(node, finish=Lsn(finish)) for node in cut.nodes))


def report(*truncates: int, last: int = 0) -> KeyDeletes:
    """What a segment reports that truncates the table at these positions, and whose last change of it is there."""
    none = np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, np.uint32)
    return KeyDeletes(
        *none, truncates=tuple((3, at) for at in truncates), last_changes=((3, max(last, *truncates, 0)),)
    )


def found(chain: Chain, *reports: KeyDeletes, is_damaged: bool = False) -> tuple[list[str], list[str]]:
    """The details of conflicts and of doubts, both about the standby's archive."""
    copies = Copies(("a", "b"), {"a": "a", "b": "a"}, chain)
    findings = Findings(SnapshotReport("daily", 0))
    if is_damaged:
        findings.damaged.add("b")
    note_contradicted({1: reports}, copies, findings)
    for one in (*findings.report.conflicts, *findings.report.doubts):
        assert (one.kind, one.node, one.group) == ("history", "b", "public.t")
    return [one.detail for one in findings.report.conflicts], [one.detail for one in findings.report.doubts]


def test_a_table_that_kept_its_file_was_not_truncated() -> None:
    # Increment 1 has the TRUNCATE; a later transaction has changed the table in increment 1.
    assert found(chain_of(5, 5, 5), report(150, last=160)) == ([WHAT], [])
    assert found(chain_of(5, 5, 5), report(150), report(last=190)) == ([WHAT], [])
    # The later change is in increment 2, so the files were read afterwards for increment 3.
    assert found(chain_of(5, 5, 5, 5), report(150), report(last=250)) == ([WHAT], [])
    # No later transaction proves that the server had shown the TRUNCATE.
    doubt = [f"{WHAT}: {WAITS}"]
    assert found(chain_of(5, 5, 5), report(150)) == ([], doubt)
    assert found(chain_of(5, 5, 5), report(150, last=250)) == ([], doubt)
    assert found(chain_of(5, 5, 5, 6), report(150, last=250)) == ([], doubt)


@pytest.mark.parametrize("last", [0, 160])
@pytest.mark.parametrize(
    ("files", "at"),
    [
        # It has another file afterwards, which the create of increment 1 or of increment 2 was the first to read.
        ((5, 6, 6), 150),
        ((5, 5, 6), 150),
        # It was truncated after the last files were read, or before the first.
        ((5, 5), 150),
        ((5, 5, 5), 90),
        ((5, 5, 5), 250),
    ],
)  # fmt: skip
def test_a_truncate_that_fits_the_files_is_no_contradiction(files: tuple[int, ...], at: int, last: int) -> None:
    assert found(chain_of(*files), report(at, last=last)) == ([], [])


def test_files_of_another_table_or_of_damaged_archives_prove_nothing() -> None:
    assert found(chain_of(5, 5, 5), report(150, last=160), is_damaged=True) == ([], [])
    assert found(chain_of(5, 5, 5), report(last=160)) == ([], [])
    # The table was dropped and created again.
    chain = chain_of(5, 5, 5)
    changes = DefinitionChanges(tables={"a": (state(5, oid=8),)})
    changed = (structs.replace(chain.increments[0], definition_changes=changes), chain.increments[1])
    assert found(Chain(chain.full, changed), report(150, last=160)) == ([], [])
