"""Commit files: what is written is read back the same, and nothing that was changed since is believed."""

from __future__ import annotations

import json
import string
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

import snapshots.commits as module
from fleet.baseline import NodeIdentity
from fleet.config import GroupRules
from fleet.groups import Column, Group
from fleet.left_out import LeftOut, LeftOutKind
from fleet.table_state import TableState
from snapshots.commit_file import commit_from_json, commit_to_json
from snapshots.commits import (
    CommitIndeterminateError,
    SnapshotExistsError,
    SnapshotMissingError,
    check_name,
    commit_key,
    publish,
    read_chain,
    read_commit,
    sealed,
    snapshot_names,
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
from storage.errors import UsageError
from storage.memory import InMemoryStore
from storage.store import AnswerLostError, StoreUnreachableError
from wal.archive import ArchiveError, OpenTransaction, Segment, SegmentRange
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


def identity(node: str, backup_of: str | None = None) -> NodeIdentity:
    return NodeIdentity(node, backup_of, "7", 1, 5, "shop", 180006, "UTF8", "C", "C", backup_of is not None)


def segment(node: str, number: int, after: int, through: int) -> Segment:
    held = SegmentRange(node, "op", after, through)
    return Segment(f"{node}/{number}", number, held, 10, "d", 1, 1, 0, 0)


def commit(number: int, chain: str = "op-0", position: int = 100) -> Commit:
    """Commit `number` of a chain of one primary and its standby, whose segments are of 100 bytes each."""
    part = FullPart(
        "fleet", "exact", {"a": identity("a"), "b": identity("b", "a")}, {"a": ()}, {"a": 0, "b": 0}, (), {"a": ()},
        GroupRules(),
    )  # fmt: skip
    cut = NodeCut(1, 2, position, (Undecided("left out", 10 + number, 11),), (20 + number,), 0)
    return Commit(
        "daily", number, f"op-{number}", chain, "2026-11-20T00:00:00Z", 1.0,
        CutRecord(f"op-{number}.1", 1, 0.001, Cut({"a": cut}, 0, 0, 0)),
        {node: (segment(node, number + 1, number * 100, number * 100 + 100),) for node in ("a", "b")},
        {}, {}, full=part if number == 0 else None,
    )  # fmt: skip


def memory() -> InMemoryStore:
    return InMemoryStore(f"memory://manifest-{next(STORES)}")


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


def test_a_commit_in_anothers_place_is_refused() -> None:
    store = memory()
    store.create(commit_key("daily", 2), sealed(commit_to_json(commit(1))))
    with pytest.raises(ManifestError, match="is the commit of increment 1 of daily"):
        read_commit(store, "daily", 2)


def test_a_chain_is_read_up_to_an_increment() -> None:
    store = memory()
    for number in range(3):
        publish(store, commit(number))
    chain = read_chain(store, "daily")
    assert [one.increment for one in chain.commits] == [0, 1, 2]
    assert read_chain(store, "daily", 1) == chain.up_to(1)
    assert read_chain(store, "daily", 0) == chain.up_to(0) == Chain(commit(0))
    assert snapshot_names(store) == ["daily"]
    with pytest.raises(SnapshotMissingError, match="increment 3 of snapshot daily"):
        read_chain(store, "daily", 3)
    with pytest.raises(SnapshotMissingError, match="snapshot weekly"):
        read_chain(store, "weekly")


def test_a_chain_with_a_hole_and_one_of_two_chains_are_refused() -> None:
    store = memory()
    publish(store, commit(0))
    publish(store, commit(2))
    with pytest.raises(SnapshotMissingError, match="increment 1"):
        read_chain(store, "daily")
    publish(store, commit(1, chain="another"))
    with pytest.raises(ManifestError, match="increment 1 of daily belongs to another chain"):
        read_chain(store, "daily")


def test_a_chain_tells_what_its_state_is_made_of() -> None:
    chain = Chain(commit(0), (commit(1, position=150), commit(2, position=250)))
    assert [one.number for one in chain.segments("b")] == [1, 2, 3]
    assert [chain.position(node) for node in ("a", "b")] == [250, 250]
    # Undecided as of the last cut alone; what was rolled back stays out for ever. A standby is like its primary.
    assert chain.excluded("a") == chain.excluded("b") == {12, 20, 21, 22}
    assert chain.up_to(1).excluded("a") == {11, 20, 21}
    assert (chain.shard_of("b"), chain.name) == ("a", "daily")
    chain.check_archive()
    hole = replace(chain, increments=chain.increments[1:])
    with pytest.raises(ArchiveError, match="hole"):
        hole.check_archive()


def test_of_two_creators_of_one_increment_one_wins() -> None:
    store = memory()
    publish(store, commit(0))
    with pytest.raises(SnapshotExistsError) as error:
        publish(store, replace(commit(0), operation="another"))
    assert error.value.exit_code == 3
    assert read_commit(store, "daily", 0) == commit(0)
    # The same operation again: its first answer was lost somewhere below.
    publish(store, commit(0))


@dataclass(frozen=True, slots=True)
class Losing(InMemoryStore):
    """A store whose answer to a create is lost; `arrives` says whether the object is stored."""

    arrives: bool = True
    reads: bool = True

    def create(self, key: str, body: bytes) -> None:
        if self.arrives:
            InMemoryStore.create(self, key, body)
        raise AnswerLostError(url=self.url, key=key, reason="the connection was lost")

    def read(self, key: str) -> bytes:
        if not self.reads:
            raise StoreUnreachableError(url=self.url, reason="it does not answer")
        return InMemoryStore.read(self, key)


def test_a_commit_whose_answer_was_lost_is_read_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BACK_PAUSES_SECONDS", (0.0, 0.0))
    publish(Losing(f"memory://manifest-{next(STORES)}"), commit(0))
    for arrives, reads in ((False, True), (True, False)):
        store = Losing(f"memory://manifest-{next(STORES)}", arrives=arrives, reads=reads)
        with pytest.raises(CommitIndeterminateError) as error:
            publish(store, commit(0))
        assert error.value.exit_code == 5


@pytest.mark.parametrize("name", ["", ".a", "-a", "a/b", "a b", "a" * 64, "ä", "a\n"])
def test_a_name_that_no_snapshot_can_have(name: str) -> None:
    with pytest.raises(UsageError):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "Daily-2026.11.20_x", "0" * 63])
def test_a_name_that_a_snapshot_can_have(name: str) -> None:
    assert check_name(name) == name
