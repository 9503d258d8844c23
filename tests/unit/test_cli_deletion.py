"""The text and the JSON of `delete` and `prune`, and their exit codes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from cutline.cli.commands.delete import LAST_RESTORABLE, code_of, document_of, lines_of, plan_document, plan_lines
from cutline.cli.commands.delete import losses_of as confirmed_deletion
from cutline.cli.commands.prune import code_of_all as code_of_prune
from cutline.cli.commands.prune import document_of as prune_document
from cutline.cli.commands.prune import lines_of as prune_result_lines
from cutline.cli.commands.prune import losses_of as confirmed_prune
from cutline.cli.commands.prune import plan_document as prune_plan_document
from cutline.cli.commands.prune import plan_lines as prune_plan_lines
from cutline.cli.output.given_up import undeleted_lines
from cutline.fleet.config import RULES, Retention
from cutline.fleet.progress import Silent
from cutline.snapshots.operations.leases import SnapshotInUseError, hold_lease, lease_expiry
from cutline.snapshots.operations.majority import claim_majority, forget_nodes
from cutline.snapshots.operations.operation import begin as begin_operation
from cutline.snapshots.operations.operation import new_operation
from cutline.snapshots.records.proven_chains import snapshot_names
from cutline.snapshots.removal.deletion import DeletionResult, delete_locked, plan_deletion
from cutline.snapshots.removal.pruning import plan_prune, prune_locked
from cutline.storage.memory import InMemoryStore
from cutline.wal.drain.slots import slot_name
from tests.unit.made_chains import FLEET, InMemoryNodes, new_removal_run, nodes_of, store_chain
from tests.unit.made_checks import ended, outcome_key, point
from tests.unit.made_commits import identity, memory

SLOT = slot_name("op-old-0")
LOCKED = "object snapshots/old/{} can't be deleted: it is locked"


def new_store_of_two_chains() -> tuple[InMemoryStore, InMemoryNodes]:
    store = memory()
    chains = [
        store_chain(store, "old", "2020-01-01T10:00:00Z", "2020-01-02T10:00:00Z"),
        store_chain(store, "new", "2020-02-01T10:00:00Z"),
    ]
    return store, nodes_of(*chains)


def test_the_plan_of_a_deletion_lists_what_is_lost_what_is_freed_and_what_stays() -> None:
    store, _ = new_store_of_two_chains()
    fleet = replace(FLEET, nodes=FLEET.nodes[:1])
    plan = plan_deletion(store, fleet, "old", force=False)
    size = sum(len(store.read(key)) for key in store.list("snapshots/old"))
    lines = plan_lines(plan)
    assert lines[0].startswith(f"delete old with all its restore points: {len(store.list('snapshots/old'))} objects")
    assert lines[1:] == [
        "lost: full snapshot of 2020-01-01 10:00:01 UTC",
        "lost: increment 1 of 2020-01-02 10:00:01 UTC",
        f"drop slot {SLOT} on a",
        f"leave slot {SLOT} on b: fleet.toml no longer names that server",
        "keep new",
        "keep the records of operations, and the name old, which can't be used again",
    ]
    document = plan_document(plan)
    assert (document["schema"], document["state"], document["bytes"]) == ("cutline/delete/1", "planned", size)
    assert document["nodes_unknown"] == ["b"]
    assert document["kept"] == ["new"]
    assert not document["drops_publications"]


def test_of_many_restore_points_a_plan_names_the_first_and_the_last() -> None:
    store = memory()
    store_chain(store, "old", *(f"2020-01-{day:02}T10:00:00Z" for day in range(1, 22)))
    lines = plan_lines(plan_deletion(store, FLEET, "old", force=True))
    assert lines[1:8] == [
        "lost: full snapshot of 2020-01-01 10:00:01 UTC",
        "lost: increment 1 of 2020-01-02 10:00:01 UTC",
        "lost: increment 2 of 2020-01-03 10:00:01 UTC",
        "lost: 15 restore points between these",
        "lost: increment 18 of 2020-01-19 10:00:01 UTC",
        "lost: increment 19 of 2020-01-20 10:00:01 UTC",
        "lost: increment 20 of 2020-01-21 10:00:01 UTC",
    ]
    assert not [line for line in lines[8:] if line.startswith("lost: ")]


def test_a_snapshot_that_is_taken_meanwhile_changes_no_confirmed_loss() -> None:
    store, _ = new_store_of_two_chains()
    deletion = plan_deletion(store, FLEET, "old", force=False)
    prune = plan_prune(store, FLEET, Retention(last=1), force=False)
    store_chain(store, "newer", "2020-02-02T10:00:00Z")
    later = plan_deletion(store, FLEET, "old", force=False)
    assert plan_lines(later) != plan_lines(deletion)
    assert confirmed_deletion(later) == confirmed_deletion(deletion)
    kept = plan_prune(store, FLEET, Retention(last=2), force=False)
    assert prune_plan_lines(kept) != prune_plan_lines(prune)
    assert confirmed_prune(kept) == confirmed_prune(prune)
    # This one loses a snapshot more.
    assert confirmed_prune(plan_prune(store, FLEET, Retention(last=1), force=False)) != confirmed_prune(prune)


def test_the_plan_says_that_nothing_can_be_restored_afterwards() -> None:
    store = memory()
    store_chain(store, "old", "2020-01-01T10:00:00Z")
    plan = plan_deletion(store, FLEET, "old", force=True)
    assert LAST_RESTORABLE in plan_lines(plan)
    # A snapshot that is taken meanwhile changes no confirmed loss.
    assert LAST_RESTORABLE not in confirmed_deletion(plan)
    store_chain(store, "new", "2020-02-01T10:00:00Z")
    assert LAST_RESTORABLE not in plan_lines(plan_deletion(store, FLEET, "old", force=True))


def test_slots_on_servers_that_others_have_replaced_are_left_and_named_with_what_drops_them() -> None:
    store, nodes = new_store_of_two_chains()
    claim_majority(store, {"a": identity("a")})
    assert f"drop slot {SLOT} on a, b" in plan_lines(plan_deletion(store, FLEET, "old", force=False))
    # The standby b of the chain was one of the server that a was then.
    forget_nodes(store, {"a": structs.replace(identity("a"), system_identifier="another")})
    behind = ["the earlier server of a", "the earlier server of b"]
    left = f"leave slot {SLOT} on {', '.join(behind)}: fleet.toml no longer names that server"
    plan = plan_deletion(store, FLEET, "old", force=False)
    assert [line for line in plan_lines(plan) if "slot" in line] == [left]
    assert (plan_document(plan)["nodes"], plan_document(plan)["nodes_unknown"]) == (["a", "b"], behind)
    pruning = plan_prune(store, FLEET, Retention(last=1), force=False)
    assert f"  {left}" in prune_plan_lines(pruning)
    assert prune_plan_document(pruning)["steps"][0]["nodes_unknown"] == behind
    # The mark alone says it, too, once a deletion has begun.
    nodes.unreachable = {"a"}
    deletion = delete_locked(new_removal_run(store, nodes), "old", lambda _plan: None)
    assert plan_deletion(store, FLEET, "old", force=False).left_behind == plan.left_behind
    assert deletion.removed is not None
    removed = structs.replace(deletion.removed, slots_left=[], slots_unknown=[f"{SLOT} on {behind[0]}"])
    assert lines_of(DeletionResult(deletion.mark, removed))[1:] == [
        f"warning: fleet.toml no longer names the server of slot {SLOT} on the earlier server of a; if it still"
        f" exists, run in its database: SELECT pg_drop_replication_slot('{SLOT}');"
    ]


def test_an_unfinished_deletion_says_what_is_left_and_how_to_finish() -> None:
    store, nodes = new_store_of_two_chains()
    nodes.unreachable = {"b"}
    deletion = delete_locked(new_removal_run(store, nodes), "old", lambda _plan: None)
    assert deletion.removed is not None
    assert code_of(deletion.removed) == 6
    assert document_of(deletion)["state"] == "unfinished"
    assert lines_of(deletion)[1:] == [
        f"warning: slot not dropped, the node is unreachable: {SLOT} on b",
        "not everything was deleted; to retry: snapshot delete old",
    ]
    refused = structs.replace(deletion.removed, slots_left=[], refused={"snapshots/old/x": LOCKED.format("x")})
    assert code_of(refused) == 3
    result = DeletionResult(deletion.mark, refused)
    assert "warning: object snapshots/old/x can't be deleted: it is locked" in lines_of(result)
    assert document_of(result)["refused"] == [{"object": "snapshots/old/x", "why": LOCKED.format("x")}]
    again = plan_lines(plan_deletion(store, FLEET, "old", force=False))
    assert again[0].startswith(f"old was deleted at {deletion.mark.at} by ")
    assert lines_of(DeletionResult(deletion.mark, None))[0].endswith("nothing of it is left in the store")


def test_a_store_that_refuses_to_delete_thousands_of_objects_is_described_in_four_lines() -> None:
    locked = {f"snapshots/old/{number}": LOCKED.format(number) for number in range(4000)}
    first = [f"warning: {LOCKED.format(number)}" for number in range(3)]
    assert undeleted_lines(locked) == [
        *first,
        "warning: the store refused to delete 4,000 objects: --json lists all of them",
    ]
    assert undeleted_lines(dict(list(locked.items())[:3])) == first


def test_deleting_the_last_snapshot_drops_the_publications_and_says_how_to_create_them_again() -> None:
    store, nodes = new_store_of_two_chains()
    delete_locked(new_removal_run(store, nodes), "old", lambda _plan: None)
    seen: list[str] = []
    deletion = delete_locked(
        new_removal_run(store, nodes, force=True), "new", lambda plan: seen.extend(plan_lines(plan))
    )
    assert "drop the publications: this is the last snapshot" in seen
    lines = lines_of(deletion)
    assert "publication dropped: a" in lines
    assert any("snapshot init" in line for line in lines)
    assert deletion.removed is not None
    assert code_of(deletion.removed) == 0


def test_a_prune_says_what_happens_to_every_snapshot_and_why() -> None:
    store, nodes = new_store_of_two_chains()
    store.delete("snapshots/new/base/a/op-new-0/part-0.parquet")
    store_chain(store, "newer", "2020-03-01T10:00:00Z")
    rules = Retention(last=1)
    plan = plan_prune(store, FLEET, rules, force=False)
    lines = prune_plan_lines(plan)
    assert lines[:2] == [
        "rules: last 1",
        "newer: kept: last 1: it is the newest; it is the newest snapshot that can be restored",
    ]
    assert lines[2].startswith("new: kept: it is damaged")
    assert "part-0.parquet is missing from the store" in lines[2]
    assert lines[3:6] == [
        "old: deleted: no rule keeps it",
        "  lost: full snapshot of 2020-01-01 10:00:01 UTC",
        "  lost: increment 1 of 2020-01-02 10:00:01 UTC",
    ]
    pruned = prune_locked(new_removal_run(store, nodes), rules, lambda _plan: None)
    document = prune_document(pruned)
    assert document["schema"] == "cutline/prune/1"
    assert document["rules"] == dict.fromkeys(RULES) | {"last": 1, "default": False}
    assert [(one["snapshot"], one["state"]) for one in document["done"]] == [("old", "done")]
    assert prune_result_lines(pruned)[0].startswith("old is deleted: ")
    assert prune_plan_lines(plan_prune(store, FLEET, rules, force=False))[-1] == "nothing to prune"


def test_a_prune_leaves_out_what_is_being_read_and_removes_the_rest() -> None:
    store, nodes = new_store_of_two_chains()
    store_chain(store, "newer", "2020-03-01T10:00:00Z")
    rules = Retention(last=1)
    with hold_lease(store, new_operation("restore", "old", 0, ("a",)), Silent()):
        plan = plan_prune(store, FLEET, rules, force=False)
        planned = [line for line in prune_plan_lines(plan) if "left out" in line]
        pruned = prune_locked(new_removal_run(store, nodes), rules, lambda _plan: None)
        assert snapshot_names(store) == ["newer", "old"]
        # Nothing else is to be removed now, and then nothing is.
        with pytest.raises(SnapshotInUseError, match="snapshot old is being restored"):
            prune_locked(new_removal_run(store, nodes), rules, lambda _plan: None)
    assert len(planned) == 1
    assert planned[0].startswith("warning: left out: snapshot old is being restored: operation ")
    assert code_of_prune(pruned) == 7
    document = prune_document(pruned)
    assert [(one["snapshot"], one["state"]) for one in document["done"]] == [("new", "done")]
    assert [one["snapshot"] for one in document["in_use"]] == ["old"]
    assert prune_plan_document(plan)["in_use"] == document["in_use"]
    lines = prune_result_lines(pruned)
    assert [line.split(": ")[0] for line in lines[:1]] == ["new is deleted"]
    assert lines[-2] == planned[0]
    assert lines[-1].endswith(": snapshot prune")
    assert code_of_prune(prune_locked(new_removal_run(store, nodes), rules, lambda _plan: None)) == 0
    assert snapshot_names(store) == ["newer"]


def test_a_restore_that_begins_during_a_prune_keeps_it_from_its_snapshot_only() -> None:
    store, nodes = new_store_of_two_chains()
    store_chain(store, "newer", "2020-03-01T10:00:00Z")
    rules = Retention(last=1)

    def begin(_plan: object) -> None:
        begin_operation(store, structs.replace(new_operation("restore", "old", 0, ("a",)), expires_at=lease_expiry()))

    pruned = prune_locked(new_removal_run(store, nodes), rules, begin)
    # Its mark is stored, and the next prune resumes it.
    assert snapshot_names(store) == ["newer"]
    assert [str(error.details["snapshot"]) for error in pruned.left] == ["old"]
    assert [step.mark.snapshot for step in pruned.steps] == ["new"]
    assert store.list("snapshots/old") != []
    assert code_of_prune(pruned) == 7


def test_what_somebody_must_do_something_about_counts_before_a_snapshot_in_use() -> None:
    store, nodes = new_store_of_two_chains()
    store_chain(store, "newer", "2020-03-01T10:00:00Z")
    with hold_lease(store, new_operation("restore", "old", 0, ("a",)), Silent()):
        pruned = prune_locked(new_removal_run(store, nodes), Retention(last=1, quota_bytes=1), lambda _plan: None)
    assert (code_of_prune(pruned), len(pruned.left)) == (3, 1)
    assert code_of_prune(structs.replace(pruned, left=())) == 3
    unreachable = structs.replace(pruned.removed[0], slots_left=["a slot"])
    assert code_of_prune(structs.replace(pruned, removed=(unreachable,))) == 6


def test_a_prune_says_what_it_keeps_in_the_place_of_snapshots_with_conflicts() -> None:
    store, nodes = new_store_of_two_chains()
    store_chain(store, "newer", "2020-03-01T10:00:00Z")
    rules = Retention(last=1)
    check = ended(store, 7, point("newer", 0, "conflicts"), point("new", 0))
    plan = plan_prune(store, FLEET, rules, force=False)
    warning = (
        "checks found conflicts in newer, so these are kept instead: new; prune will remove them once there are enough"
        " newer snapshots without conflicts"
    )
    assert prune_plan_lines(plan)[1:4] == [
        "newer: kept: last 1: it is the newest; it is the newest snapshot that can be restored;"
        " it is not counted, because the check that ended at 2026-11-24 10:07 UTC found conflicts: see snapshot check"
        " newer",
        "new: kept: last 1: it is the newest without conflicts; it is the newest snapshot without conflicts",
        "old: deleted: no rule keeps it",
    ]
    assert f"warning: {warning}" in prune_plan_lines(plan)
    document = prune_plan_document(plan)
    checked = {
        "operation": check,
        "ended_at": "2026-11-24T10:07:30.000Z",
        "increment": 0,
        "result": "conflicts",
        "full": True,
        "rests_on_records": False,
        "oldest_read_at": None,
    }
    assert [one["checked"] for one in document["snapshots"]] == [checked, checked | {"result": "valid"}, None]
    assert document["warnings"] == [warning]
    prune_locked(new_removal_run(store, nodes), rules, lambda _plan: None)
    assert snapshot_names(store) == ["new", "newer"]

    # Once a full check has found it valid, it counts again.
    ended(store, 8, point("newer", 0))
    plan = plan_prune(store, FLEET, rules, force=False)
    assert [(step.kind, step.mark.snapshot) for step in plan.steps] == [("delete", "new")]
    assert plan.warnings == []


def test_a_prune_says_if_every_snapshot_has_conflicts() -> None:
    store, _ = new_store_of_two_chains()
    ended(store, 7, point("new", 0, "conflicts"), point("old", 1, "conflicts"))
    plan = plan_prune(store, FLEET, Retention(last=1), force=False)
    assert plan.warnings == [
        "checks found conflicts in every snapshot that can be restored (new, old), so no older snapshot is kept"
        " instead: only age and number decide"
    ]
    assert [(step.kind, step.mark.snapshot) for step in plan.steps] == [("delete", "old")]


def test_a_prune_says_if_it_can_not_read_what_a_check_has_found() -> None:
    store, _ = new_store_of_two_chains()
    check = ended(store, 7, point("new", 0, "conflicts"))
    key = outcome_key(check, point("new", 0, "conflicts"))
    store.delete(key)
    store.create(key, b"{" * 500)
    plan = plan_prune(store, FLEET, Retention(last=1), force=False)
    assert plan.warnings == [
        "check records that can't be read or that end in the future (their conflicts count, other results don't):"
        f" {check}; see: snapshot history"
    ]
