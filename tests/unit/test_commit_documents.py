"""Commit files: a commit is read back as it was written, and any later change is detected."""

from __future__ import annotations

import copy
import json
import string
from datetime import UTC, datetime
from typing import Any, TypeVar
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from cutline.fleet.config import GroupRules
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import fields_of
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from cutline.nodes.left_out import LeftOut, LeftOutKind
from cutline.nodes.table_state import Counters, TableState
from cutline.snapshots.records import commit as commit_module
from cutline.snapshots.records.commit import (
    Commit,
    CutRecord,
    DefinitionChanges,
    FullInParts,
    FullSnapshot,
    Increment,
    Previous,
    Sequence,
    StoredObject,
    Void,
)
from cutline.snapshots.records.documents import ManifestError, parse_document, seal, unseal
from cutline.snapshots.records.proven_chains import commit_key, read_commit
from cutline.wal.cut.cut_values import NodeCut, Undecided
from cutline.wal.segments.archive import OpenTransaction, Segment
from tests.unit.made_commits import as_read, commit, memory

T = TypeVar("T")
TEXTS = st.text(max_size=8)
NAMES = st.text(string.ascii_lowercase, min_size=1, max_size=3)
POSITIONS = st.integers(0, 2**63 - 1).map(Lsn)
COUNTS = st.integers(0, 2**40)
VALUES = st.integers(-(2**63) + 1, 2**63 - 1)
SECONDS = st.integers(0, 10**6).map(lambda thousandths: thousandths / 1000)


def tuples_of(values: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[T, ...]]:
    return st.lists(values, max_size=2).map(tuple)


KEYS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
TIMES = st.datetimes(timezones=st.just(UTC)).map(datetime.isoformat)
COLUMNS = st.builds(Column, TEXTS, TEXTS, COUNTS, st.integers(-1, 99), COUNTS, COUNTS, st.none() | TEXTS)
GROUPS = st.builds(Group, st.integers(1, 9), TEXTS, TEXTS, TEXTS, COUNTS, tuples_of(COLUMNS), COUNTS)
SEQUENCES = st.builds(
    Sequence, TEXTS, TEXTS, VALUES, st.booleans(), st.integers(1, 9), st.booleans(), VALUES, VALUES, st.booleans()
)
RULES = st.builds(GroupRules, tuples_of(TEXTS), tuples_of(TEXTS), tuples_of(TEXTS))
TABLE_STATES = st.builds(
    TableState, TEXTS, COUNTS, TEXTS, TEXTS, COUNTS, COUNTS, TEXTS, tuples_of(TEXTS),
    st.none() | st.builds(Counters, COUNTS, COUNTS, TEXTS),
)  # fmt: skip
STATES = st.lists(TABLE_STATES, max_size=2, unique_by=lambda one: one.table).map(tuple)


def node_cuts(node: str) -> st.SearchStrategy[NodeCut]:
    undecided = tuples_of(st.builds(Undecided, TEXTS, POSITIONS, POSITIONS))
    rolled_back = tuples_of(POSITIONS)
    return st.builds(
        NodeCut, st.just(node), POSITIONS, POSITIONS, POSITIONS, COUNTS, undecided, rolled_back, st.just(()), TIMES
    )


def segments_of(node: str) -> st.SearchStrategy[tuple[Segment, ...]]:
    return tuples_of(
        st.builds(
            Segment, key=KEYS, number=COUNTS, size=COUNTS, digest=TEXTS, events_at=st.none() | COUNTS,
            events_digest=TEXTS, changes=COUNTS, events=COUNTS, partials=COUNTS, truncates=COUNTS,
            node=st.just(node), operation=TEXTS, after=POSITIONS, through=POSITIONS,
            open=st.none() | st.builds(OpenTransaction, POSITIONS, st.integers(-1, 2**40), COUNTS),
        )
    )  # fmt: skip


def identities(node: str, backup_of: str | None) -> st.SearchStrategy[NodeIdentity]:
    return st.builds(
        NodeIdentity, st.just(node), st.just(backup_of), TEXTS, COUNTS, COUNTS, TEXTS, COUNTS, TEXTS, TEXTS, TEXTS,
        st.booleans(),
    )  # fmt: skip


def objects_of(groups: tuple[Group, ...], node: str) -> st.SearchStrategy[tuple[StoredObject, ...]]:
    numbers = [group.number for group in groups]
    rows = st.dictionaries(st.sampled_from(numbers), COUNTS) if numbers else st.just({})
    return tuples_of(st.builds(StoredObject, KEYS, TEXTS, st.just(node), COUNTS, TEXTS, rows))


@st.composite
def commits(draw: st.DrawFn, *, full: bool | None = None) -> Commit:
    """Commits whose parts are consistent, as in those that a create makes."""
    shards = draw(st.lists(NAMES, min_size=1, max_size=2, unique=True))
    backups = {f"{shard}-standby": shard for shard in shards if draw(st.booleans())}
    nodes = {**dict.fromkeys(shards), **backups}

    def of_shards(values: st.SearchStrategy[T]) -> dict[str, T]:
        return {shard: draw(values) for shard in shards}

    common: dict[str, Any] = {
        "snapshot": draw(TEXTS),
        "operation": draw(TEXTS),
        "chain": draw(TEXTS),
        "created_at": draw(TIMES),
        "seconds": draw(SECONDS),
        "comment": draw(TEXTS),
        "counts": {name: draw(COUNTS) for name in ("bytes", "changes", "transactions", "rows")},
        "cut": CutRecord(
            id=draw(TEXTS), attempts=draw(COUNTS), causes=draw(tuples_of(TEXTS)), seconds=draw(SECONDS),
            nodes=tuple(draw(node_cuts(shard)) for shard in shards), global_transactions=draw(COUNTS),
            included_early=draw(COUNTS), in_flight=draw(COUNTS), made_at=draw(TIMES), safe_at=draw(TIMES),
            skew_seconds=draw(SECONDS),
        ),
        "sequences": of_shards(tuples_of(SEQUENCES)),
        "segments": {node: draw(segments_of(node)) for node in nodes},
        "left_out": draw(tuples_of(st.builds(LeftOut, TEXTS, st.sampled_from(LeftOutKind), TEXTS, TEXTS, COUNTS))),
        "terminal": draw(st.booleans()),
    }  # fmt: skip
    if draw(st.booleans()) if full is None else full:
        unique = st.lists(GROUPS, max_size=3, unique_by=lambda group: group.number).map(tuple)
        groups: dict[str, tuple[Group, ...]] = of_shards(unique)
        return FullSnapshot(
            increment=0,
            fleet_id=draw(TEXTS),
            global_id_form=draw(TEXTS),
            baseline=tuple(draw(identities(node, of)) for node, of in nodes.items()),
            groups=groups,
            base={node: draw(POSITIONS) for node in nodes},
            copied=tuple(one for node, of in nodes.items() for one in draw(objects_of(groups[of or node], node))),
            roles=of_shards(tuples_of(TEXTS)),
            rules=draw(RULES),
            tables=of_shards(STATES),
            fingerprints=of_shards(TEXTS),
            slots_complete_at=draw(st.just({}) | st.fixed_dictionaries(dict.fromkeys(shards, POSITIONS))),
            **common,
        )
    changes = None
    if draw(st.booleans()):
        added = of_shards(st.lists(GROUPS, max_size=2, unique_by=lambda group: group.number).map(tuple))
        numbers = st.integers(1, 9)
        changes = DefinitionChanges(
            added, of_shards(tuples_of(numbers)), of_shards(st.dictionaries(numbers, numbers, max_size=2)),
            {node: draw(st.dictionaries(numbers, POSITIONS, max_size=2)) for node in nodes},
            {node: draw(st.dictionaries(numbers, st.integers(0, 2**40), max_size=2)) for node in nodes},
            of_shards(STATES),
            tuple(one for node, of in nodes.items() for one in draw(objects_of(added[of or node], node))),
            of_shards(tuples_of(TEXTS)), of_shards(TEXTS),
        )  # fmt: skip
    return Increment(
        increment=draw(st.integers(1, 2**40)),
        previous=draw(st.none() | st.builds(Previous, TEXTS, TEXTS)),
        definition_changes=changes,
        **common,
    )


COMMITS = commits()


def read_back(body: bytes) -> Commit | Void:
    """The commit as its types read it: drawn parts do not fit each other as those of a create do."""
    content, digest = unseal("the/key", body)
    found: Commit | Void = parse_document("the/key", content, FullInParts | Increment | Void)
    return found if isinstance(found, Void) else structs.replace(found, digest=digest)


@given(COMMITS)
def test_a_commit_is_read_back_equal_and_sealed_to_the_same_bytes(found: Commit) -> None:
    body = seal(found)
    read = read_back(body)
    assert read == as_read(found)
    assert seal(read) == body
    assert seal(json.loads(body)) == body


@given(found=COMMITS, is_equal=st.booleans())
def test_groups_that_several_shards_have_are_stored_once(found: Commit, *, is_equal: bool) -> None:
    if not isinstance(found, FullSnapshot):
        return
    if is_equal and found.groups:
        # The values are objects of their own, as those that are read from the catalogs of several shards.
        groups = next(iter(found.groups.values()))
        found = structs.replace(found, groups={shard: copy.deepcopy(groups) for shard in found.groups})
    with patch.object(commit_module, "SHARED_FROM", 0):
        body = seal(found)
        read = read_back(body)
        assert read == as_read(found)
        assert seal(read) == body
    stored = json.loads(body)
    distinct = {*found.groups.values()}
    assert len(stored["groups"]) == len(distinct)
    assert stored["groups"].keys() | stored.get("same_groups", {}).keys() == found.groups.keys()
    assert len({id(groups) for groups in read.groups.values()}) == len(distinct)  # type: ignore[union-attr]
    columns = {group.columns for groups in distinct for group in groups}
    assert len(stored.get("column_lists", ())) == len(columns)
    assert len({id(group.columns) for groups in read.groups.values() for group in groups}) == len(columns)  # type: ignore[union-attr]


@pytest.mark.parametrize("columns", [1, "0", -1, None, 1.5])
def test_columns_that_are_in_no_list_are_refused(columns: object) -> None:
    group = Group(1, "public", "one", "default", 1, (Column("id", "bigint", 20, -1, 0, 1),))
    with patch.object(commit_module, "SHARED_FROM", 0):
        document = json.loads(seal(structs.replace(commit(0), groups={"a": (group,)})))
    assert len(document["column_lists"]) == 1
    document["groups"]["a"][0]["columns"] = 0
    read_back(seal(document))
    document["groups"]["a"][0]["columns"] = columns
    with pytest.raises(ManifestError, match="the/key"):
        read_back(seal(document))


def test_a_commit_of_few_groups_contains_those_of_each_shard() -> None:
    assert b"same_groups" not in seal(structs.replace(commit(0), groups={"a": (), "b": ()}))


@pytest.mark.parametrize("same", [{"a": "a"}, {"b": "c"}, {"b": "b"}, {"b": "c", "c": "a"}, {"a": "b", "b": "a"}])
def test_groups_of_a_shard_that_has_none_are_refused(same: dict[str, str]) -> None:
    with pytest.raises(ManifestError, match=r"the/key .*groups and same_groups contradict each other"):
        read_back(seal(fields_of(commit(0)) | {"same_groups": same}))


def test_no_byte_of_a_commit_can_change_unnoticed() -> None:
    body = seal(commit(1))
    for place in range(len(body)):
        store = memory()
        store.create(commit_key("daily", 1), body[:place] + bytes([body[place] ^ 0x10]) + body[place + 1 :])
        with pytest.raises(ManifestError) as error:
            read_commit(store, "daily", 1)
        assert commit_key("daily", 1) in error.value.message


@pytest.mark.parametrize("name", ["snapshot", "cut", "segments", "counts", "operation", "schema"])
def test_a_missing_field_is_refused_by_name(name: str) -> None:
    document = fields_of(commit(0))
    del document[name]
    with pytest.raises(ManifestError, match=f"object the/key is not a valid document .*missing .* field `{name}`"):
        read_back(seal(document))


def test_a_commit_of_a_newer_format_is_refused() -> None:
    with pytest.raises(ManifestError) as error:
        read_back(seal(fields_of(commit(0)) | {"schema": "cutline/snapshot/3"}))
    assert "newer version" in error.value.hint
