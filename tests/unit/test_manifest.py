"""Commit files: what is written is read back the same, and nothing that was changed since is believed."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Column, Group
from fleet.left_out import LeftOut, LeftOutKind
from fleet.table_state import TableState
from snapshots.commit_file import commit_from_json, commit_to_json
from snapshots.commits import (
    commit_key,
    read_commit,
    sealed,
)
from snapshots.manifest import (
    Chain,
    Commit,
    CutRecord,
    FullPart,
    ManifestError,
    Sequence,
    StoredObject,
)
from tests.unit.made_commits import commit, memory
from wal.archive import OpenTransaction, Segment, SegmentRange
from wal.cut_values import Cut, NodeCut, Undecided

STORES = count()
TEXTS = st.text(max_size=8)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3)
PLACES = st.integers(0, 2**63 - 1)
COUNTS = st.integers(0, 2**40)
SECONDS = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)


def few(keys: st.SearchStrategy[str], values: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(keys, values, max_size=3)


def several(values: st.SearchStrategy[object]) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(values, max_size=3).map(tuple)


RANGES = st.builds(
    SegmentRange, TEXTS, TEXTS, PLACES, PLACES, st.none() | st.builds(OpenTransaction, PLACES, st.integers(-1, 2**40))
)
SEGMENTS = st.builds(Segment, TEXTS, COUNTS, RANGES, COUNTS, TEXTS, COUNTS, COUNTS, COUNTS, COUNTS)
NODE_CUTS = st.builds(
    NodeCut, PLACES, PLACES, PLACES, several(st.builds(Undecided, TEXTS, PLACES, PLACES)), several(PLACES), COUNTS
)
CUTS = st.builds(CutRecord, TEXTS, COUNTS, SECONDS, st.builds(Cut, few(NAMES, NODE_CUTS), COUNTS, COUNTS, COUNTS))
IDENTITIES = st.builds(
    NodeIdentity, TEXTS, st.none() | TEXTS, TEXTS, COUNTS, COUNTS, TEXTS, COUNTS, TEXTS, TEXTS, TEXTS, st.booleans()
)
COLUMNS = st.builds(Column, TEXTS, TEXTS, COUNTS, st.integers(-1, 99), COUNTS)
GROUPS = st.builds(Group, COUNTS, TEXTS, TEXTS, TEXTS, COUNTS, several(COLUMNS), COUNTS)
OBJECTS = st.builds(
    StoredObject, TEXTS, TEXTS, TEXTS, COUNTS, TEXTS, st.dictionaries(st.integers(1, 99), COUNTS, max_size=3)
)
RULES = st.builds(GroupRules, several(TEXTS), several(TEXTS), several(TEXTS))
TABLE_STATES = st.builds(TableState, TEXTS, COUNTS, TEXTS, TEXTS, COUNTS, TEXTS, several(TEXTS))
FULL_PARTS = st.builds(
    FullPart,
    TEXTS,
    TEXTS,
    several(IDENTITIES).map(lambda found: {one.node: one for one in found}),
    few(NAMES, several(GROUPS)),
    few(NAMES, PLACES),
    several(OBJECTS),
    few(NAMES, several(TEXTS)),
    RULES,
    few(NAMES, several(TABLE_STATES).map(lambda found: {one.table: one for one in found})),
)
COMMITS = st.builds(
    Commit,
    snapshot=TEXTS,
    increment=COUNTS,
    operation=TEXTS,
    chain=TEXTS,
    created_at=TEXTS,
    seconds=SECONDS,
    cut=CUTS,
    segments=few(NAMES, several(SEGMENTS)),
    sequences=few(NAMES, several(st.builds(Sequence, TEXTS, TEXTS, st.none() | st.integers()))),
    counts=few(NAMES, COUNTS),
    comment=TEXTS,
    full=st.none() | FULL_PARTS,
    left_out=st.none() | several(st.builds(LeftOut, TEXTS, st.sampled_from(LeftOutKind), TEXTS, TEXTS, COUNTS)),
)


@given(COMMITS)
def test_a_commit_is_what_its_file_says(found: Commit) -> None:
    document = json.loads(sealed(commit_to_json(found)))
    assert commit_from_json("key", document) == found


@given(COMMITS.filter(lambda found: found.full))
def test_a_commit_of_before_the_tables_states_is_read(found: Commit) -> None:
    document = {name: value for name, value in commit_to_json(found).items() if name != "tables"}
    read = commit_from_json("key", document)
    assert read.full
    assert found.full
    assert read.full == replace(found.full, tables={})


@given(COMMITS)
def test_a_seal_does_not_depend_on_who_sealed(found: Commit) -> None:
    body = sealed(commit_to_json(found))
    assert sealed(json.loads(body)) == body


def test_no_byte_of_a_commit_can_change_unnoticed() -> None:
    body = sealed(commit_to_json(commit(1)))
    for place in range(len(body)):
        store = memory()
        store.create(commit_key("daily", 1), body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :])
        with pytest.raises(ManifestError) as error:
            read_commit(store, "daily", 1)
        assert commit_key("daily", 1) in error.value.message


@pytest.mark.parametrize("name", ["snapshot", "cut", "segments", "counts", "operation", "schema"])
def test_a_commit_that_lacks_something_is_refused_by_name(name: str) -> None:
    document = commit_to_json(commit(0))
    del document[name]
    with pytest.raises(ManifestError, match="object the/key is no commit file"):
        commit_from_json("the/key", document)


def test_a_commit_that_names_nothing_left_out_is_read_and_its_append_only_tables_are_still_named() -> None:
    found = commit(0)
    document = commit_to_json(found)
    assert "left_out" not in document
    assert commit_from_json("key", document) == found
    assert Chain(found).left_out == ()
    log = Group(1, "public", "log", "append_only", 0, ())
    assert found.full
    chain = Chain(replace(found, full=replace(found.full, groups={"a": (log,)})))
    assert [(one.node, one.kind, one.name) for one in chain.left_out] == [("a", "append_only_table", "public.log")]
    assert chain.append_only == ["public.log"]


def test_only_sequences_that_the_full_snapshots_ddl_makes_are_set() -> None:
    unlogged = LeftOut("a", LeftOutKind.UNLOGGED_SEQUENCE, "s.turned_logged", "")
    of_another = LeftOut("b", LeftOutKind.UNLOGGED_SEQUENCE, "s.new", "")
    full = replace(commit(0), sequences={"a": (Sequence("s", "old", 1),)}, left_out=(unlogged, of_another))
    later = tuple(Sequence("s", name, 7) for name in ("new", "old", "turned_logged"))
    chain = Chain(full, (replace(commit(1), sequences={"a": later}),))
    assert chain.sequence_names("a") == {"s.old", "s.turned_logged"}
    assert chain.sequences("a") == later[1:]


def test_a_commit_of_a_newer_format_is_refused() -> None:
    with pytest.raises(ManifestError) as error:
        commit_from_json("key", commit_to_json(commit(0)) | {"schema": "cutline/snapshot/2"})
    assert "newer version" in error.value.hint
