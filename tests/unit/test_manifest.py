"""Commit files: what is written is read back the same, and nothing that was changed since is believed."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from datetime import UTC, datetime
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Column, Group
from fleet.left_out import LeftOut, LeftOutKind
from fleet.table_state import TableState
from snapshots.chain import Chain
from snapshots.commit_file import commit_from_json, commit_to_json
from snapshots.commits import (
    commit_key,
    read_commit,
)
from snapshots.documents import ManifestError, sealed
from snapshots.manifest import Commit, CutRecord, FullPart, SchemaPart, Sequence, StoredObject
from tests.unit.made_commits import commit, memory
from wal.archive import OpenTransaction, Segment, SegmentRange
from wal.cut_values import Cut, NodeCut, Undecided

T = TypeVar("T")
TEXTS = st.text(max_size=8)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3)
PLACES = st.integers(0, 2**63 - 1)
COUNTS = st.integers(0, 2**40)
SECONDS = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)


def several(values: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(values, max_size=2).map(tuple)


KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TIMES = st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
NODE_CUTS = st.builds(
    NodeCut, PLACES, PLACES, PLACES, several(st.builds(Undecided, TEXTS, PLACES, PLACES)), several(PLACES), COUNTS
)
COLUMNS = st.builds(Column, TEXTS, TEXTS, COUNTS, st.integers(-1, 99), COUNTS, COUNTS, st.none() | TEXTS)
GROUPS = st.builds(Group, st.integers(1, 9), TEXTS, TEXTS, TEXTS, COUNTS, several(COLUMNS), COUNTS)
SEQUENCES = st.builds(
    Sequence, TEXTS, TEXTS, st.integers(-(2**63) + 1, 2**63 - 1), st.booleans(), st.integers(1, 9), st.booleans()
)
RULES = st.builds(GroupRules, several(TEXTS), several(TEXTS), several(TEXTS))
TABLE_STATES = st.builds(TableState, TEXTS, COUNTS, TEXTS, TEXTS, COUNTS, COUNTS, TEXTS, several(TEXTS))
STATES = several(TABLE_STATES).map(lambda found: {one.table: one for one in found})


def segments_of(node: str) -> st.SearchStrategy[tuple[Segment, ...]]:
    opened = st.none() | st.builds(OpenTransaction, PLACES, st.integers(-1, 2**40))
    held = st.builds(SegmentRange, st.just(node), TEXTS, PLACES, PLACES, opened)
    events = st.none() | COUNTS
    return several(st.builds(Segment, KEYS, COUNTS, held, COUNTS, TEXTS, COUNTS, COUNTS, COUNTS, COUNTS, events))


def identities(node: str, backup_of: str | None) -> st.SearchStrategy[NodeIdentity]:
    return st.builds(
        NodeIdentity, st.just(node), st.just(backup_of), TEXTS, COUNTS, COUNTS, TEXTS, COUNTS, TEXTS, TEXTS, TEXTS,
        st.booleans(),
    )  # fmt: skip


def objects_of(groups: tuple[Group, ...], node: str) -> st.SearchStrategy[tuple[StoredObject, ...]]:
    numbers = [group.number for group in groups]
    rows = st.dictionaries(st.sampled_from(numbers), COUNTS) if numbers else st.just({})
    return several(st.builds(StoredObject, KEYS, TEXTS, st.just(node), COUNTS, TEXTS, rows))


@st.composite
def commits(draw: st.DrawFn, *, full: bool | None = None) -> Commit:
    """Commits whose parts fit together, as a create makes them."""
    shards = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    backups = {f"{shard}-standby": shard for shard in shards if draw(st.booleans())}
    nodes = {**dict.fromkeys(shards), **backups}

    def of_shards(values: st.SearchStrategy[T]) -> dict[str, T]:
        return {shard: draw(values) for shard in shards}

    part = None
    if draw(st.booleans()) if full is None else full:
        unique = st.lists(GROUPS, max_size=3, unique_by=lambda group: group.number).map(tuple)
        groups: dict[str, tuple[Group, ...]] = of_shards(unique)
        part = FullPart(
            draw(TEXTS), draw(TEXTS), {node: draw(identities(node, of)) for node, of in nodes.items()}, groups,
            {node: draw(PLACES) for node in nodes},
            tuple(one for node, of in nodes.items() for one in draw(objects_of(groups[of or node], node))),
            of_shards(several(TEXTS)), draw(RULES), of_shards(STATES),
            of_shards(TEXTS),
        )  # fmt: skip
    schema = None
    if part is None and draw(st.booleans()):
        begun = of_shards(st.lists(GROUPS, max_size=2, unique_by=lambda group: group.number).map(tuple))
        numbers = st.integers(1, 9)
        schema = SchemaPart(
            begun, of_shards(several(numbers)), of_shards(st.dictionaries(numbers, numbers, max_size=2)),
            {node: draw(st.dictionaries(numbers, PLACES, max_size=2)) for node in nodes}, of_shards(STATES),
            tuple(one for node, of in nodes.items() for one in draw(objects_of(begun[of or node], node))),
            of_shards(several(TEXTS)), of_shards(TEXTS),
        )  # fmt: skip
    cut = Cut(of_shards(NODE_CUTS), draw(COUNTS), draw(COUNTS), draw(COUNTS))
    return Commit(
        snapshot=draw(TEXTS),
        increment=0 if part else draw(st.integers(1, 2**40)),
        operation=draw(TEXTS),
        chain=draw(TEXTS),
        created_at=draw(TIMES),
        seconds=draw(SECONDS),
        cut=CutRecord(draw(TEXTS), draw(COUNTS), draw(SECONDS), cut, draw(several(TEXTS))),
        segments={node: draw(segments_of(node)) for node in nodes},
        sequences=of_shards(several(SEQUENCES)),
        counts={name: draw(COUNTS) for name in ("bytes", "changes", "transactions", "rows")},
        comment=draw(TEXTS),
        full=part,
        schema=schema,
        left_out=draw(
            st.none() | several(st.builds(LeftOut, TEXTS, st.sampled_from(LeftOutKind), TEXTS, TEXTS, COUNTS))
        ),
    )


COMMITS = commits()


@given(COMMITS)
def test_a_commit_is_what_its_file_says(found: Commit) -> None:
    document = json.loads(sealed(commit_to_json(found)))
    assert commit_from_json("key", document) == found


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


def test_a_commit_of_a_newer_format_is_refused() -> None:
    with pytest.raises(ManifestError) as error:
        commit_from_json("key", commit_to_json(commit(0)) | {"schema": "cutline/snapshot/3"})
    assert "newer version" in error.value.hint
