"""What `delete` and `prune` tell a person and a script, and how they end."""

from __future__ import annotations

from dataclasses import replace

from cli.commands.delete import code_of, document_of, lines_of, plan_document, plan_lines
from cli.commands.prune import document_of as prune_document
from cli.commands.prune import lines_of as prune_result_lines
from cli.commands.prune import plan_lines as prune_plan_lines
from fleet.config import Retention
from snapshots.removal.deletion import DeletionResult, delete_locked, plan_deletion
from snapshots.removal.pruning import plan_prune, prune_locked
from storage.memory import InMemoryStore
from tests.unit.made_chains import FLEET, HeldNodes, deleting, nodes_of, take
from tests.unit.made_commits import memory
from wal.slots.slots import slot_name

SLOT = slot_name("op-old-0")


def two_chains() -> tuple[InMemoryStore, HeldNodes]:
    store = memory()
    chains = [
        take(store, "old", "2020-01-01T10:00:00Z", "2020-01-02T10:00:00Z"),
        take(store, "new", "2020-02-01T10:00:00Z"),
    ]
    return store, nodes_of(*chains)


def test_a_deletion_tells_first_what_is_lost_what_is_freed_and_what_stays() -> None:
    store, _ = two_chains()
    fleet = replace(FLEET, nodes=FLEET.nodes[:1])
    plan = plan_deletion(store, fleet, "old", force=False)
    size = sum(len(store.read(key)) for key in store.list("snapshots/old"))
    lines = plan_lines(plan)
    assert lines[0].startswith(f"delete old with all its restore points: {len(store.list('snapshots/old'))} objects")
    assert lines[1:] == [
        "lost: full snapshot of 2020-01-01 10:00:00 UTC",
        "lost: increment 1 of 2020-01-02 10:00:00 UTC",
        f"drop slot {SLOT} on a, b",
        "keep new",
        "keep the records of operations, and the name old, which can't be used again",
    ]
    document = plan_document(plan)
    assert (document["schema"], document["state"], document["bytes"]) == ("cutline/delete/1", "planned", size)
    assert document["nodes_unknown"] == ["b"]
    assert document["kept"] == ["new"]
    assert not document["drops_publications"]


def test_what_could_not_be_done_is_told_with_how_to_finish_it() -> None:
    store, nodes = two_chains()
    nodes.away = {"b"}
    deletion = delete_locked(deleting(store, nodes), "old", lambda _plan: None)
    assert deletion.removed is not None
    assert code_of(deletion.removed) == 6
    assert document_of(deletion)["state"] == "unfinished"
    assert lines_of(deletion)[1:] == [
        f"warning: slot not dropped, the node is unreachable: {SLOT} on b",
        "not everything was deleted; repeat: snapshot delete old",
    ]
    refused = replace(deletion.removed, slots_left=[], refused={"snapshots/old/x": "object lock"})
    assert code_of(refused) == 3
    told = DeletionResult(deletion.mark, refused)
    assert "warning: the store refused to delete snapshots/old/x: object lock" in lines_of(told)
    assert document_of(told)["refused"] == [{"object": "snapshots/old/x", "why": "object lock"}]
    again = plan_lines(plan_deletion(store, FLEET, "old", force=False))
    assert again[0].startswith(f"old was deleted at {deletion.mark.at} by ")
    assert lines_of(DeletionResult(deletion.mark, None))[0].endswith("nothing is left of it")


def test_the_last_deletion_says_that_the_publications_go_and_what_the_next_snapshot_needs() -> None:
    store, nodes = two_chains()
    delete_locked(deleting(store, nodes), "old", lambda _plan: None)
    seen: list[str] = []
    deletion = delete_locked(deleting(store, nodes, force=True), "new", lambda plan: seen.extend(plan_lines(plan)))
    assert "drop the publications: this is the last snapshot" in seen
    lines = lines_of(deletion)
    assert "publication dropped: a" in lines
    assert any("snapshot init" in line for line in lines)
    assert deletion.removed is not None
    assert code_of(deletion.removed) == 0


def test_a_prune_tells_of_every_snapshot_what_becomes_of_it_and_why() -> None:
    store, nodes = two_chains()
    store.delete("snapshots/new/base/a/op-new-0/part-0.parquet")
    take(store, "newer", "2020-03-01T10:00:00Z")
    rules = Retention(keep_full=1)
    plan = plan_prune(store, FLEET, rules, force=False)
    lines = prune_plan_lines(plan)
    assert lines[0] == "newer: kept: keep_full 1: it is number 1 from the newest"
    assert lines[1].startswith("new: kept: it is damaged")
    assert "part-0.parquet is gone from the store" in lines[1]
    assert lines[2:5] == [
        "old: deleted: no rule keeps it",
        "  lost: full snapshot of 2020-01-01 10:00:00 UTC",
        "  lost: increment 1 of 2020-01-02 10:00:00 UTC",
    ]
    pruned = prune_locked(deleting(store, nodes), rules, lambda _plan: None)
    document = prune_document(pruned)
    assert document["schema"] == "cutline/prune/1"
    assert document["rules"] == {"keep_full": 1, "keep_days": None, "keep_increments": None}
    assert [(one["snapshot"], one["state"]) for one in document["done"]] == [("old", "done")]
    assert prune_result_lines(pruned)[0].startswith("old is deleted: ")
    assert prune_plan_lines(plan_prune(store, FLEET, rules, force=False))[-1] == "nothing to prune"
