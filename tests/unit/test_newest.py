"""Reading the newest part of a chain: the state of the whole, from few commits, each of which a later one names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest
from msgspec import structs
from msgspec.structs import replace

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Time
from cutline.nodes.table_state import TableState
from cutline.snapshots.ddl.table_changes import known_tables
from cutline.snapshots.operations.committing import put_commit
from cutline.snapshots.records.chain import Chain, summary_of
from cutline.snapshots.records.commit import (
    COMMENT_MAX,
    DDL,
    ChainHistory,
    DefinitionChanges,
    Increment,
    Previous,
    StoredObject,
    Void,
)
from cutline.snapshots.records.documents import ManifestError, seal
from cutline.snapshots.records.proven_chains import (
    SnapshotMissingError,
    commit_key,
    read_chain,
    read_commit,
    read_continued,
    read_newest_part,
    read_summaries,
)
from cutline.snapshots.records.tombstones import only_full_key
from cutline.storage.memory import InMemoryStore
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import ArchiveError
from tests.unit.made_commits import commit, counted, full_commit, increment_commit, mark, unused_url

BLOCK = 64


@dataclass(frozen=True, slots=True)
class NotingStore(InMemoryStore):
    """A store that notes the increments that are read."""

    read_keys: list[str] = field(default_factory=list)

    def read_range(self, key: str, start: int, size: int) -> bytes:
        self.read_keys.append(key)
        return InMemoryStore.read_range(self, key, start, size)


def new_ddl(number: int) -> DefinitionChanges:
    """The DDL of increment `number` was dumped again."""
    stored = StoredObject(f"snapshots/daily/schema/a/op-{number}/archive.dump.zst", DDL, "a", 5, "d", {})
    return DefinitionChanges(objects=(stored,), roles={"a": ()}, fingerprints={"a": f"{number}"})


def store_chain(increments: int, redefining: Iterable[int] = (), early: int = 0) -> NotingStore:
    """A chain of which these increments change DDL; the first `early` ones do not say what is before them."""
    store = NotingStore(unused_url())
    put_commit(store, counted(commit(0)))
    chain = read_chain(store, "daily")
    for number in range(1, increments + 1):
        changes = new_ddl(number) if number in set(redefining) else None
        made = structs.replace(
            commit(number, position=100 * (number + 1)), definition_changes=changes,
            previous=Previous(chain.last.operation, chain.last.digest), comment=f"the {number}th",
        )  # fmt: skip
        assert isinstance(made, Increment)
        if number > early:
            made = structs.replace(made, history=chain.next_history)
        put_commit(store, counted(made))
        read = read_commit(store, "daily", number)
        assert isinstance(read, Increment)
        chain = Chain(chain.full, (*chain.increments, read))
    store.read_keys.clear()
    return store


def increments_read(store: NotingStore) -> list[int]:
    """Which increments were read and are there, as often as they were."""
    numbers = [int(key.rpartition("/")[2].split(".")[0]) for key in store.read_keys if "/increments/" in key]
    return sorted(one for one in numbers if store.exists(commit_key("daily", one)))


@pytest.mark.parametrize("increments", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 1, 3 * BLOCK + 5])
def test_the_newest_and_one_commit_of_64_have_the_summaries_of_all(increments: int) -> None:
    store = store_chain(increments)
    newest = read_newest_part(store, "daily")
    assert increments_read(store) == [increments]
    summaries = read_summaries(store, newest)
    # 64 after 65 to 128, 128 after 129 to 192.
    assert increments_read(store) == [*range(BLOCK, increments, BLOCK), increments]
    assert [one.increment for one in summaries] == list(range(1, increments + 1))
    assert [one.comment for one in summaries] == [f"the {number}th" for number in range(1, increments + 1)]
    whole = read_chain(store, "daily")
    assert summaries == tuple(map(summary_of, whole.increments)) == read_summaries(store, whole)
    assert newest.next_history == whole.next_history
    assert newest.is_partial


def test_each_commit_of_a_chain_is_read_once() -> None:
    store = store_chain(3)
    full = read_chain(store, "daily", 0).full
    assert store.read_keys.count(commit_key("daily", 0)) == 1
    assert read_continued(store, "daily", full).last.increment == 3
    assert store.read_keys.count(commit_key("daily", 0)) == 1
    assert increments_read(store) == [3]
    store.read_keys.clear()
    assert len(read_chain(store, "daily").increments) == 3
    assert [store.read_keys.count(commit_key("daily", number)) for number in range(4)] == [1, 1, 1, 1]


def test_what_changed_definitions_is_read_and_gives_the_state_of_the_whole() -> None:
    store = store_chain(2 * BLOCK + 7, redefining=(3, BLOCK, 2 * BLOCK))
    newest = read_newest_part(store, "daily")
    assert increments_read(store) == [3, BLOCK, 2 * BLOCK, 2 * BLOCK + 7]
    whole = read_chain(store, "daily")
    assert newest.fingerprint("a") == f"{2 * BLOCK}" == whole.fingerprint("a")
    assert newest.position("a") == 100 * (2 * BLOCK + 8) == whole.position("a")
    assert known_tables(newest) == known_tables(whole)
    for read in (Chain.ddl_object, Chain.roles, Chain.base_entries, Chain.sequences):
        assert read(newest, "a") == read(whole, "a")
    assert newest.left_out == whole.left_out
    newest.check_archive()


def test_a_hole_in_the_newest_segments_is_found_in_a_partial_chain() -> None:
    newest = read_newest_part(store_chain(3), "daily")
    first = newest.last.segments["a"][0]
    later = structs.replace(first, number=first.number + 2, after=first.through, through=Lsn(first.through + 50))
    segments = {"a": (first, later), "b": newest.last.segments["b"]}
    holed = replace(newest, increments=(structs.replace(newest.increments[-1], segments=segments),))
    with pytest.raises(ArchiveError, match="archive has a gap"):
        holed.check_archive()


def test_the_whole_chain_is_read_if_the_newest_segments_do_not_reach_back_to_the_last_cut() -> None:
    store = store_chain(2)
    chain = read_chain(store, "daily")
    # Its segment begins at 300, its cut is at 250.
    made = structs.replace(
        commit(3, position=250), previous=Previous(chain.last.operation, chain.last.digest),
        history=chain.next_history,
    )  # fmt: skip
    before = structs.replace(read_commit(store, "daily", 2), cut=commit(2, position=200).cut)
    assert before.cut.of("a").position < made.cut.of("a").position
    replace_commit(store, 2, cut=before.cut)
    chain = read_chain(store, "daily")
    made = structs.replace(made, previous=Previous(chain.last.operation, chain.last.digest), history=chain.next_history)
    put_commit(store, counted(made))
    newest = read_newest_part(store, "daily")
    assert (newest.is_partial, newest.last.increment) == (False, 3)


@pytest.mark.parametrize(
    ("increments", "early", "redefining"), [(6, 5, (5,)), (8, 5, (3, 4)), (3, 2, (1, 2, 3)), (70, 66, (2, 65, 68))]
)
def test_definitions_that_early_versions_wrote_are_read_for_later_increments(
    increments: int, early: int, redefining: tuple[int, ...]
) -> None:
    store = store_chain(increments, redefining, early)
    newest = read_newest_part(store, "daily")
    assert (newest.is_partial, newest.fingerprint("a")) == (True, f"{max(redefining)}")
    assert increments_read(store) == sorted({*redefining, increments})
    assert newest.next_history == read_chain(store, "daily").next_history


@pytest.mark.parametrize("early", [1, 5, BLOCK, BLOCK + 3])
def test_a_chain_that_an_early_version_began_is_read_whole_until_its_next_increment(early: int) -> None:
    store = store_chain(early, early=early)
    assert not read_newest_part(store, "daily").is_partial
    assert set(increments_read(store)) == set(range(1, early + 1))
    store = store_chain(early + BLOCK, early=early)
    newest = read_newest_part(store, "daily")
    assert increments_read(store) == [early + BLOCK]
    assert [one.increment for one in read_summaries(store, newest)] == list(range(1, early + BLOCK + 1))


def test_of_a_chain_whose_next_increment_is_voided_the_newest_part_is_read() -> None:
    store = store_chain(5)
    store.create(commit_key("daily", 6), seal(Void("daily", 6, "op-6")))
    newest = read_newest_part(store, "daily")
    assert (newest.is_partial, newest.last.increment, set(increments_read(store))) == (True, 5, {5, 6})


@pytest.mark.parametrize("body", [b"", seal(Void("daily", 3, "op-3"))])
def test_a_commit_that_is_too_small_is_found_though_it_is_not_needed(body: bytes) -> None:
    store = store_chain(5)
    store.delete(commit_key("daily", 3))
    store.create(commit_key("daily", 3), body)
    with pytest.raises((ManifestError, SnapshotMissingError), match="0000000000000003"):
        read_newest_part(store, "daily")


def test_what_needs_the_whole_chain_is_refused_to_the_newest_part() -> None:
    newest = read_newest_part(store_chain(3), "daily")
    for use in (lambda: newest.segments("a"), lambda: newest.excluded("a"), lambda: newest.up_to(1)):
        with pytest.raises(RuntimeError, match="only the newest part"):
            use()
    assert [one.number for one in newest.newest_segments("b")] == [4]


def replace_commit(store: ObjectStore, number: int, **changes: object) -> None:
    """Replace a commit by a changed one with a valid digest, as anybody who can write to the store can."""
    one = structs.replace(read_commit(store, "daily", number), **changes)
    store.delete(commit_key("daily", number))
    store.create(commit_key("daily", number), seal(one))


@pytest.mark.parametrize("number", [0, 2, BLOCK])
def test_a_commit_that_is_not_the_one_that_the_newest_names_is_refused(number: int) -> None:
    store = store_chain(BLOCK + 2, redefining=(2,))
    replace_commit(store, number, comment="another")
    with pytest.raises(ManifestError, match=commit_key("daily", number)):
        read_summaries(store, read_newest_part(store, "daily"))


def test_a_missing_commit_is_reported_although_its_content_is_not_needed() -> None:
    store = store_chain(5)
    store.delete(commit_key("daily", 3))
    with pytest.raises(SnapshotMissingError, match="commit file is missing"):
        read_newest_part(store, "daily")


Change = Callable[[ChainHistory], ChainHistory]
# What no history can be, whatever else the chain has.
IMPOSSIBLE: list[Change] = [
    lambda history: structs.replace(history, recent=()),
    lambda history: structs.replace(history, recent=history.recent[1:]),
    lambda history: structs.replace(history, recent=history.recent[::-1]),
    lambda history: structs.replace(history, recent=(summary_of(commit(0)), *history.recent)),
    lambda history: structs.replace(history, redefinitions={0: "0" * 64}),
    lambda history: structs.replace(history, redefinitions={4: "0" * 64}),
    lambda history: structs.replace(history, redefinitions={1: "0" * 64}),
    lambda history: structs.replace(
        history, recent=(*history.recent[:-1], structs.replace(history.recent[-1], digest="0" * 64))
    ),
]
# What only the commits before it refute.
UNTRUE: list[Change] = [
    lambda history: structs.replace(history, full="0" * 64),
    lambda history: structs.replace(history, redefinitions={1: history.recent[0].digest}),
    lambda history: structs.replace(
        history, recent=(structs.replace(history.recent[0], changes=7), *history.recent[1:])
    ),
    lambda history: structs.replace(
        history, recent=(structs.replace(history.recent[0], cut_at=Time("2026-11-20T00:00:00Z")), *history.recent[1:])
    ),
]


@pytest.mark.parametrize("change", IMPOSSIBLE)
def test_an_impossible_history_is_refused_by_whoever_reads_the_commit(change: Change) -> None:
    store = store_chain(4)
    newest = read_commit(store, "daily", 4)
    assert isinstance(newest, Increment)
    assert newest.history is not None
    replace_commit(store, 4, history=change(newest.history))
    for read in (read_chain, read_newest_part):
        with pytest.raises(ManifestError, match="history"):
            read(store, "daily")


@pytest.mark.parametrize("change", UNTRUE)
def test_reading_the_whole_chain_refuses_an_untrue_history(change: Change) -> None:
    store = store_chain(4)
    newest = read_commit(store, "daily", 4)
    assert isinstance(newest, Increment)
    assert newest.history is not None
    replace_commit(store, 4, history=change(newest.history))
    with pytest.raises(ManifestError, match="history does not match the previous commits"):
        read_chain(store, "daily")


def test_an_increment_of_another_chain_is_named_and_not_the_full_snapshot() -> None:
    store = store_chain(2)
    replace_commit(store, 2, chain="op-other", segments={"a": (), "b": ()})
    for read in (read_chain, read_newest_part):
        with pytest.raises(ManifestError, match=r"0002\.json: increment 2 of daily belongs to another chain"):
            read(store, "daily")


def test_of_a_pruned_snapshot_no_increment_is_read() -> None:
    store = store_chain(2)
    store.create(only_full_key("daily"), seal(mark(only_full=True)))
    store.delete(commit_key("daily", 2))
    store.create(commit_key("daily", 2), b"damaged")
    assert read_newest_part(store, "daily") == read_chain(store, "daily") == Chain(read_chain(store, "daily").full)


def test_a_long_comment_is_cut_in_the_history_of_the_next_commit_alone() -> None:
    for length, kept in ((COMMENT_MAX, "x" * COMMENT_MAX), (COMMENT_MAX + 1, "x" * (COMMENT_MAX - 1) + "…")):
        store = store_chain(1)
        replace_commit(store, 1, comment="x" * length)
        chain = read_chain(store, "daily")
        assert chain.next_history.recent[0].comment == kept
        assert read_summaries(store, chain)[0].comment == "x" * length


@pytest.mark.parametrize(
    ("stored", "are_together"),
    [
        ([], True),
        ([{"states"}], False),
        ([{"fingerprint"}], True),
        ([{"states", "fingerprint"}], True),
        ([{"states", "fingerprint"}, {"states"}], False),
        ([{"states"}, {"fingerprint"}], True),
    ],
)
def test_later_states_are_not_of_the_fingerprint(stored: list[set[str]], *, are_together: bool) -> None:
    """Only then does the same fingerprint show that the publications are the same."""
    state = TableState("public.t", 1, "p", "m", 1, 1, "", (), None)
    chain = Chain(full_commit())
    for number, kinds in enumerate(stored, start=1):
        changes = DefinitionChanges(
            tables={"a": (state,)} if "states" in kinds else {},
            fingerprints={"a": "f"} if "fingerprint" in kinds else {},
        )
        chain = chain.followed_by(structs.replace(increment_commit(number), definition_changes=changes))
    assert chain.are_states_of_fingerprint("a") == are_together
