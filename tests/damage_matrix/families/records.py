"""Damage of the documents around a snapshot: operations, the record of primaries, marks, tombstones, the identity.

Sealed, as somebody who copies documents by hand or writes them without Cutline would.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping

from cutline.snapshots.records.documents import seal
from tests.damage_matrix.damaged import Damaged, Document
from tests.damage_matrix.families.raw import commit_of
from tests.damage_matrix.kinds import DAMAGED, PAIRS, SINGLE, Expected, Hidden, Kind, Refused, doubted, found

OPERATIONS, MARKS, STORE = "records: operations", "records: marks and tombstones", "records: the store's identity"
ONLY_SAVES_WORK = "the commit decides; the outcome only saves work"
BASELINE_KEY = f"baselines/{1:016d}.json"
RENAMED = "a node may have got another name in the fleet file since, or a copy of the slot"
OTHER_OPERATION = "20260101T000000Z-0123456789"
CONFLICTS_KEY = f"operations/{OTHER_OPERATION}/conflicts.json"
AT = "2026-11-20T01:02:03.000Z"


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _operations()
    yield from _marks()
    yield from _identity()


def _document(name: str, increment: int, change: Callable[[Document], object]) -> Callable[[Damaged], None]:
    return lambda store: store.change_document(store.operation_key(name, increment), change)


def _cut_conflicts(size: int) -> Callable[[Damaged], None]:
    """Return what stores the beginning of an outcome as that of a later check that found conflicts."""
    return lambda store: store.write(CONFLICTS_KEY, store.read(store.operation_key("outcome", 2))[:size])


def _operations() -> Iterator[Kind]:
    def lose(*names: str, increment: int = 2) -> Callable[[Damaged], None]:
        def damage(store: Damaged) -> None:
            for name in names:
                store.remove(store.operation_key(name, increment))

        return damage

    yield Kind("an outcome is lost", OPERATIONS, PAIRS, lose("outcome"), Hidden(ONLY_SAVES_WORK, is_same=True))
    yield Kind("an intent is lost", OPERATIONS, PAIRS, lose("intent"), Hidden(ONLY_SAVES_WORK, is_same=True))
    yield Kind("the intent of the full snapshot is lost", OPERATIONS, PAIRS, lose("intent", increment=0),
               doubted("operation", reason="gc may have ended between two deletions", is_same=True))  # fmt: skip
    yield Kind("an operation is lost", OPERATIONS, PAIRS, lose("intent", "outcome"),
               Hidden("gc removes the documents of operations that have ended", is_same=True))  # fmt: skip
    yield Kind("all operations are lost", OPERATIONS, PAIRS, lambda store: store.remove_folder("operations"),
               Hidden("gc removes the documents of operations that have ended", is_same=True))  # fmt: skip
    wrong: Mapping[str, Callable[[Document], object]] = {
        "an outcome says that a commit failed": lambda one: one.update(state="failed", reason="made up", code=1),
        "an outcome is of another increment": lambda one: one.update(increment=9),
        "an outcome is of another snapshot": lambda one: one.update(snapshot="other"),
        "an outcome is of another kind of operation": lambda one: one.update(kind="check"),
        "an outcome has other volumes": lambda one: one["volumes"].update(rows=one["volumes"]["rows"] + 1),
    }
    for name, change in wrong.items():
        yield Kind(name, OPERATIONS, PAIRS, _document("outcome", 2, change), found("operation", "missing", "commit"))
    yield Kind("the outcome of the full snapshot names another commit", OPERATIONS, PAIRS,
               _document("outcome", 0, lambda one: one.update(commit_digest="0" * 64)), found("operation"))  # fmt: skip
    refused: Mapping[str, Callable[[Document], object]] = {
        "an outcome is of another operation": lambda one: one.update(operation=OTHER_OPERATION),
        "an outcome has an unknown state": lambda one: one.update(state="perhaps"),
        "an outcome has a field more": lambda one: one.update(more=1),
        "an outcome has no end": lambda one: one.pop("ended_at"),
    }
    for name, change in refused.items():
        yield Kind(name, OPERATIONS, PAIRS, _document("outcome", 2, change), found("operation", object=DAMAGED))
    described: Mapping[str, Callable[[Document], object]] = {
        "an outcome has another time": lambda one: one.update(ended_at=AT),
        "an outcome took longer": lambda one: one["phases"].update(cut=99.0),
    }
    for name, change in described.items():
        yield Kind(name, OPERATIONS, PAIRS, _document("outcome", 2, change),
                   Hidden("the value describes, and nothing depends on it", is_same=True))  # fmt: skip
    yield Kind("an intent is of another operation", OPERATIONS, PAIRS,
               _document("intent", 2, lambda one: one.update(operation=OTHER_OPERATION)),
               Hidden(ONLY_SAVES_WORK, is_same=True))  # fmt: skip
    for length, size in {"one byte": 1, "300 bytes": 300}.items():
        yield Kind(f"a check's record of conflicts is cut to {length}", OPERATIONS, PAIRS, _cut_conflicts(size),
                   found("operation", object=CONFLICTS_KEY))  # fmt: skip
    yield Kind("two outcomes are exchanged", OPERATIONS, PAIRS,
               lambda store: store.exchange(store.operation_key("outcome", 1), store.operation_key("outcome", 2)),
               found("operation", object=DAMAGED))  # fmt: skip

    def open_operation(store: Damaged) -> None:
        intent = json.loads(store.read(store.operation_key("intent", 2)))
        intent.update(operation=OTHER_OPERATION, increment=4)
        store.write(f"operations/{OTHER_OPERATION}/intent.json", seal(intent))

    yield Kind("an operation that was never begun", OPERATIONS, PAIRS, open_operation,
               Hidden("the operation may be running", is_same=True))  # fmt: skip
    yield Kind("the newest increment is lost, and its operation", OPERATIONS, SINGLE, _forget_newest,
               Hidden("the store is as it was before the increment"))  # fmt: skip

    def claims_newer(store: Damaged) -> None:
        outcome = json.loads(store.read(store.operation_key("outcome", 3)))
        later = f"{store.last['operation'].rpartition('-')[0]}-ffffffffff"
        outcome.update(operation=later, increment=4)
        store.write(f"operations/{later}/outcome.json", seal(outcome))

    yield Kind("an outcome of an increment that does not exist", OPERATIONS, SINGLE, claims_newer, found("missing"))


def _forget_newest(store: Damaged) -> None:
    store.remove(commit_of(store, 3))
    store.remove_folder(f"operations/{store.last['operation']}")


def _marks() -> Iterator[Kind]:
    def planting(key: Callable[[Damaged], str], document: Callable[[Damaged], Document]) -> Callable[[Damaged], None]:
        def damage(store: Damaged) -> None:
            store.write(key(store), seal(document(store)))
            store.keys.add(key(store))

        return damage

    def tombstone(store: Damaged, **fields: object) -> Document:
        # Of the second of the newest increment.
        operation, at = f"{store.last['operation'].rpartition('-')[0]}-ffffffffff", store.last["cut"]["made_at"]
        return {
            "schema": "cutline/deleted/1", "snapshot": store.name, "operation": operation, "at": at, "by": "ops",
            "chain": store.commits[0]["chain"], "slots": [], "nodes": [], "points": [], "objects": 1, "bytes": 1,
        } | fields  # fmt: skip

    def ended(store: Damaged, **fields: object) -> Document:
        return {
            "schema": "cutline/ended/1", "snapshot": store.name, "chain": store.commits[0]["chain"],
            "after_increment": 3, "node": "s1", "at": store.last["cut"]["made_at"],
        } | fields  # fmt: skip

    def tombstone_key(store: Damaged) -> str:
        return f"deleted/{store.name}.json"

    def only_full_key(store: Damaged) -> str:
        return f"snapshots/{store.name}/only-full.json"

    def end_key(store: Damaged) -> str:
        return f"snapshots/{store.name}/ended/{store.commits[0]['chain']}.json"

    cases: Mapping[str, tuple[Callable[[Damaged], None], Expected]] = {
        "a tombstone is planted": (planting(tombstone_key, tombstone), Refused("snapshot-deleted", 3)),
        "a tombstone of another snapshot": (
            planting(tombstone_key, lambda store: tombstone(store, snapshot="other")), found("mark", object=DAMAGED)),
        "a tombstone of another chain": (
            planting(tombstone_key, lambda store: tombstone(store, chain=OTHER_OPERATION)),
            Refused("snapshot-deleted", 3)),
        "a tombstone with a field more": (
            planting(tombstone_key, lambda store: tombstone(store, more=1)), found("mark", object=DAMAGED)),
        "the mark of pruned increments is planted": (
            planting(only_full_key, lambda store: tombstone(store, schema="cutline/only-full/1")),
            # The increments, which a prune removes, are still there, as after a prune that was interrupted.
            Hidden("a prune that was interrupted leaves the same")),
        "the mark of pruned increments is of another snapshot": (
            planting(only_full_key, lambda store: tombstone(store, schema="cutline/only-full/1", snapshot="other")),
            found("mark", object=DAMAGED)),
        "the mark of pruned increments has a field more": (
            planting(only_full_key, lambda store: tombstone(store, schema="cutline/only-full/1", more=1)),
            found("mark", object=DAMAGED)),
        "the mark of an ended chain is planted": (
            planting(end_key, ended), Hidden("a chain that has ended keeps its restore points", is_same=True)),
        "the mark of an ended chain is of another chain": (
            planting(end_key, lambda store: ended(store, chain=OTHER_OPERATION)), found("mark", object=DAMAGED)),
        "the mark of an ended chain names an increment that does not exist": (
            planting(end_key, lambda store: ended(store, after_increment=9)), found("mark", "missing")),
        "the mark of an ended chain names an earlier increment": (
            planting(end_key, lambda store: ended(store, after_increment=1)), found("mark")),
        "the mark of an ended chain names an unknown node": (
            planting(end_key, lambda store: ended(store, node="s9")),
            doubted("mark", reason=RENAMED, is_same=True)),
        "a mark of a chain that is not the snapshot's": (
            planting(lambda store: f"snapshots/{store.name}/ended/{OTHER_OPERATION}.json",
                     lambda store: ended(store, chain=OTHER_OPERATION)),
            Hidden("the mark may be of an earlier chain with this name", is_same=True)),
    }  # fmt: skip
    for name, (damage, expected) in cases.items():
        yield Kind(name, MARKS, PAIRS, damage, expected)


def _identity() -> Iterator[Kind]:
    def of_fleet(change: Callable[[Document], object]) -> Callable[[Damaged], None]:
        return lambda store: store.change_document("fleet.json", change)

    yield Kind("another fleet id", STORE, PAIRS, of_fleet(lambda one: one.update(fleet="0badf00d")), found("fleet"))
    yield Kind("another fleet name", STORE, PAIRS, of_fleet(lambda one: one.update(name="other")),
               Refused("store-of-another-fleet", 3))  # fmt: skip
    yield Kind("a newer format", STORE, PAIRS, of_fleet(lambda one: one.update(format=2)), Refused("manifest", 3))
    yield Kind("a field more", STORE, PAIRS, of_fleet(lambda one: one.update(more=1)), Refused("manifest", 3))

    def of_primaries(change: Callable[[Document], object]) -> Callable[[Damaged], None]:
        return lambda store: store.change_document(BASELINE_KEY, change)

    cases: Mapping[str, Callable[[Damaged], None]] = {
        "the record of primaries lacks one": of_primaries(lambda one: one["primaries"].pop()),
        "the record of primaries has another server":
            of_primaries(lambda one: one["primaries"][0].update(system_identifier="1")),
        "the record of primaries is lost": lambda store: store.remove(BASELINE_KEY),
        "the record of primaries can't be read": lambda store: store.damage(BASELINE_KEY, lambda body: body[:-1]),
        "the record of primaries has a field more": of_primaries(lambda one: one.update(more=1)),
    }  # fmt: skip
    for name, damage in cases.items():
        yield Kind(name, STORE, PAIRS, damage, found("primaries", "baseline", "fleet"))
