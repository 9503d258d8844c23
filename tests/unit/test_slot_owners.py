"""Which slots a removal drops, and which it leaves to others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from cutline.fleet.config import Retention, WatchTable
from cutline.fleet.messages import FREE_SLOTS
from cutline.fleet.progress import News
from cutline.fleet.units import Interval
from cutline.snapshots.create.context import not_ended_by_watch
from cutline.snapshots.operations.operation import begin, new_operation, record_outcome
from cutline.snapshots.operations.slot_guard import (
    KeptChain,
    find_kept_chain,
    free_slots_text,
    mark_set_aside,
    note_older_chains,
    note_unknown_slots,
    read_slot_owners,
    rule_on_slots,
    ruling_text,
    warning_text,
)
from cutline.snapshots.records.end_marks import read_end
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.proven_chains import snapshot_names
from cutline.snapshots.records.tombstones import (
    DELETED,
    ONLY_FULL,
    Mark,
    put_mark,
)
from cutline.snapshots.removal.deletion import plan_deletion
from cutline.snapshots.removal.pruning import plan_prune
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import Retained
from cutline.wal.drain.slots import chain_of_slot, copy_slot_name, slot_name
from tests.commands.watching import Watching
from tests.unit.made_chains import FLEET, nodes_of, store_chain
from tests.unit.made_commits import memory
from tests.unit.made_deletions import (
    NEW,
    OLD,
    delete,
    prune,
    store_two_chains,
)
from tests.unit.made_garbage import StoreBuilder, backdate, run_gc

# A chain that another store has on the same nodes.
ELSEWHERE = "20261120T074343Z-3f9a01bc77"


@pytest.mark.parametrize(
    ("chain", "slot"),
    [
        ("op-old-0", "debezium_orders"),
        ("", "debezium_orders"),
        ("op-new-0", "cutline_op_new_0"),
        ("OP-NEW-0", "cutline_op_new_0"),
        ("", "cutline_op_new_0"),
        (ELSEWHERE, slot_name(ELSEWHERE)),
        ("", slot_name(ELSEWHERE)),
    ],
    ids=[
        "of an application", "without a chain", "of another snapshot", "by another id", "of another, without a chain",
        "of another store", "of another store, without a chain",
    ],
)  # fmt: skip
def test_a_tombstone_drops_no_slot_of_anybody_else(chain: str, slot: str) -> None:
    store = memory()
    nodes = store_two_chains(store)
    nodes.slots |= {(slot, "a"), (slot, "b")}
    plant_tombstone(store, chain, slot)
    before = set(nodes.slots)
    removed = delete(store, nodes).removed
    assert nodes.slots == before
    assert removed is not None
    assert removed.slots_foreign == [slot]
    assert removed.is_done


def plant_tombstone(store: ObjectStore, chain: str, slot: str) -> None:
    by, at = "cutline delete old ops@db7:1", "2026-11-21T10:00:00+00:00"
    put_mark(store, Mark(DELETED, "old", "op-planted", at, by, chain, (slot,), ("a", "b"), (), 0, 0))


@pytest.mark.parametrize("planted", ["OP-NEW-0", "op_new_0"])
def test_a_create_with_an_id_of_the_same_slot_gives_it_to_nobody(planted: str) -> None:
    store = memory()
    nodes = store_two_chains(store)
    begin(store, structs.replace(new_operation("create", "old", 0, ("a", "b")), operation=planted))
    plant_tombstone(store, planted, "cutline_op_new_0")
    assert read_slot_owners(store).owner_of("cutline_op_new_0") is None
    delete(store, nodes)
    assert nodes.slots == nodes_of("op-old-0", "op-new-0").slots


def test_gc_keeps_the_record_of_a_slot_until_it_is_dropped() -> None:
    made = StoreBuilder()
    chain = made.take_full("old").full.operation
    nodes = nodes_of(chain)
    nodes.unreachable = {"b"}
    removed = delete(made.store, nodes, force=True).removed
    assert removed is not None
    assert removed.slots_left
    backdate(made.store, 60)
    run_gc(made.store)
    nodes.unreachable = set()
    delete(made.store, nodes, force=True)
    assert nodes.slots == set()
    backdate(made.store, 60)
    run_gc(made.store)
    assert not made.store.exists(operation_key(chain, "intent"))


def test_publications_stay_while_an_unlisted_chain_of_the_store_has_slots() -> None:
    store = memory()
    chain = new_operation("create", "old", 0, ("a", "b"))
    begin(store, chain)
    nodes = store_two_chains(store)
    delete(store, nodes)
    nodes.slots |= {(slot_name(chain.id), "a")}
    removed = delete(store, nodes, "new", force=True).removed
    assert removed is not None
    assert (removed.publications, nodes.publications) == ([], {"a"})
    # Slots of another store's chains do not keep our publications.
    nodes.slots = {(slot_name(new_operation("create", "other", 0, ()).id), "a")}
    assert nodes.drop_publications(lambda slot: store.exists(operation_key(chain_of_slot(slot), "intent")))[0] == ["a"]


def test_slots_of_deleted_and_pruned_chains_are_recognised() -> None:
    store = memory()
    nodes = store_two_chains(store)

    def removal_text_of(name: str) -> str:
        slot = slot_name(f"op-{name}-0")
        kept = KeptChain(slot, (Retained("b", slot, 1, 100),))
        return find_kept_chain(store, kept, read_slot_owners(store).owner_of(slot)).removal_text

    assert (removal_text_of("old"), removal_text_of("new")) == ("", "")
    prune(store, nodes, last=1, only_full="all")
    assert removal_text_of("old") == "the increments of snapshot old were pruned"
    delete(store, nodes)
    assert (removal_text_of("old"), removal_text_of("new")) == ("snapshot old was deleted", "")


def test_a_pruned_chain_without_increments_leaves_no_slot_and_the_newest_keeps_its_own() -> None:
    store = memory()
    nodes = nodes_of(
        *(store_chain(store, name, at) for name, at in (("old", OLD[0]), ("newer", OLD[1]), ("new", NEW[0])))
    )
    removed = prune(store, nodes, last=1, only_full=2).removed
    assert [(one.mark.snapshot, one.mark.format) for one in removed] == [("old", DELETED), ("newer", ONLY_FULL)]
    assert nodes.slots == nodes_of("op-new-0").slots
    assert snapshot_names(store) == ["new", "newer"]
    plan = plan_prune(store, FLEET, Retention(last=1, only_full=2), force=False)
    assert not plan.steps
    # Its slot was dropped then: no later plan says that it will be.
    plan = plan_prune(store, FLEET, Retention(last=1), force=False)
    assert [(step.mark.snapshot, step.slots) for step in plan.steps] == [("newer", ())]
    assert plan_deletion(store, FLEET, "newer", force=False).slots == ()
    assert plan_deletion(store, FLEET, "new", force=True).slots == (slot_name("op-new-0"),)


@pytest.mark.parametrize("state", ["done", "failed", ""])
def test_the_slot_of_a_copy_is_needed_only_until_its_operation_has_ended(state: str) -> None:
    """However much WAL is retained for it: it is not the chain's slot."""
    store = memory()
    store_two_chains(store)
    copying = new_operation("create", "new", 3, ("a", "b"))
    begin(store, copying)
    if state:
        record_outcome(store, copying, state)
    slot = copy_slot_name(copying.id)
    for size in (1, 99):
        owner = read_slot_owners(store).owner_of(slot)
        kept = find_kept_chain(store, KeptChain(slot, (Retained("b", slot, size, 100),)), owner)
        assert (kept.chain, kept.snapshot, kept.is_ended_copy) == (copying.id, None, bool(state))
        assert copying.id in kept.label
    # The chain whose database a restore sets aside has a slot of its own there.
    mark_set_aside(store, [(copy_slot_name("op-new-0"), "b")], "op-9")
    assert read_end(store, "new", "op-new-0") is None


def says(kept: KeptChain, continued: str | None = None, *, requires: bool = False, ended: bool = False) -> str:
    """What a create, a preview and `list` say of the slots of `kept`; `requires`: fleet.toml requires all standbys."""
    fleet = replace(FLEET, standbys_min=None) if requires else FLEET
    return ruling_text(kept, rule_on_slots(kept, fleet, ended=ended), continued)


def test_a_slot_past_its_limit_is_reported_with_what_the_next_create_does_and_how_to_keep_the_chain() -> None:
    def kept_on(node: str, **more: str) -> KeptChain:
        return KeptChain("cutline_op", (Retained(node, "cutline_op", 3 << 20, 2 << 20),), **more)

    chain = {"snapshot": "daily", "chain": "op"}
    over = "node {} keeps 3.0 MiB of WAL for {}, more than its limit of 2.0 MiB"
    primary, standby = over.format("a", "snapshot daily"), over.format("b", "snapshot daily")
    ends = "will drop its slot on {0}, which ends only the copy of this node"
    again = (
        "; the next increment copies {0} again: snapshot create daily --incremental; if nobody continues this chain:"
        " snapshot end daily"
    )
    assert says(kept_on("a", **chain)) == f"{primary}: the next create {ends.format('a')}{again.format('a')}"
    for requires in (True, False):
        found = says(kept_on("b", **chain), requires=requires)
        assert found == f"{standby}: the next create {ends.format('b')}{again.format('b')}"
    assert says(kept_on("a", **chain), "op") == f"{primary}: the increment {ends.format('a')}, and copy a again"
    assert says(kept_on("a", **chain), "op-other") == says(kept_on("a", **chain))
    loose = over.format("a", "slot cutline_op, not part of a snapshot in this store")
    assert says(kept_on("a")) == f"{loose}: the next create will drop its slots"
    unfinished = over.format("a", "snapshot daily, which is not finished")
    assert says(kept_on("a", unfinished="daily")) == (
        f"{unfinished}: the next create will drop its slots, so it can't be resumed"
    )


def test_a_slot_that_the_next_create_drops_without_any_limit_is_reported() -> None:
    kept = KeptChain("cutline_op", (Retained("a", "cutline_op", 1, 100),), chain="op")
    assert says(kept) == ""
    assert says(structs.replace(kept, is_failed=True)) == (
        "operation op has failed but still has slots: the next create will drop them"
    )
    assert says(structs.replace(kept, is_ended_copy=True)).startswith(
        "operation op has ended but still has slots for copying"
    )
    assert says(structs.replace(kept, removal_text="snapshot x was deleted")).startswith(
        "snapshot x was deleted but still has"
    )
    ended = says(structs.replace(kept, snapshot="daily"), ended=True)
    assert ended.startswith("snapshot daily will get no more increments but")


def test_only_the_slot_of_a_copy_that_no_operation_of_the_store_makes_is_unknown() -> None:
    store = memory()
    copying = new_operation("create", "new", 3, ("a",))
    begin(store, copying)
    watching = Watching()
    for slot in (copy_slot_name(copying.id), copy_slot_name(ELSEWHERE)):
        kept = KeptChain(slot, (Retained("a", slot, 1, 100),))
        note_unknown_slots([find_kept_chain(store, kept, read_slot_owners(store).owner_of(slot))], watching)
    (note,) = watching.notes
    assert copy_slot_name(ELSEWHERE) in note


def test_a_hint_about_slots_in_use_names_what_frees_them() -> None:
    assert free_slots_text([], [], []) == FREE_SLOTS
    assert "snapshot end" not in free_slots_text(["a"], [], [])
    assert free_slots_text(["a"], [], [], "the chain that goes on").endswith(": snapshot end a")
    text = free_slots_text(["a", "b", "c"], ["op-1"], ["cutline_x"])
    assert [one for one in text.split("; ") if "snapshot " in one or "SELECT" in one] == [
        "to end those that get no more increments, and keep their restore points: snapshot end a",
        "snapshot end b",
        "operation op-1 is a full snapshot: if it runs (snapshot status), wait for it",
        "to give it up if it was interrupted: snapshot cancel op-1",
        "if nobody needs it: SELECT pg_drop_replication_slot('cutline_x')",
    ]


def test_the_warning_about_retained_wal_says_how_to_continue_the_chain_and_how_to_end_it() -> None:
    text = warning_text(KeptChain("cutline_1", (Retained("a", "cutline_1", 60, 100),), "old"))
    assert text.endswith(
        "; take an increment: snapshot create old --incremental; if nobody continues this chain: snapshot end old"
    )
    assert "snapshot end" not in warning_text(KeptChain("cutline_1", (Retained("a", "cutline_1", 60, 100),)))


def test_a_full_snapshot_names_the_chains_that_nothing_else_ends() -> None:
    store, watching = memory(), Watching()
    store_two_chains(store)
    # The third is not finished.
    note_older_chains(store, ["new", "old", "unfinished"], watching)
    assert [note.partition("snapshots: ")[2] for note in watching.notes] == [
        "new, old; to end the chain of one that needs no more increments, and keep its restore points: snapshot end new"
    ]
    # Nothing else ends them, so the note also appears with --quiet.
    assert not any(isinstance(note, News) for note in watching.notes)
    note_older_chains(store, ["unfinished"], watching)
    assert len(watching.notes) == 1
    # A watch ends the older chains of its own.
    watched = replace(FLEET, watch=WatchTable(every=Interval(60), name="w-{n}"))
    names = ["old", "w-1", "w-2"]
    assert not_ended_by_watch(FLEET, "w-2", names) == ["old", "w-1"]
    assert not_ended_by_watch(watched, "w-2", names) == ["old"]
    assert not_ended_by_watch(watched, "old", names) == ["w-1", "w-2"]


def test_a_restore_that_ends_a_chain_is_recorded_with_all_its_nodes() -> None:
    store = memory()
    store_two_chains(store)
    mark_set_aside(
        store, [(slot_name("op-new-0"), "b"), ("debezium_orders", "a"), (slot_name("op-new-0"), "a")], "op-9"
    )
    lost = read_end(store, "new", "op-new-0")
    assert lost is not None
    assert (lost.restore, lost.node, lost.nodes) == ("op-9", "a", ("a", "b"))
    assert read_end(store, "old", "op-old-0") is None
