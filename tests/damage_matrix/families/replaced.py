"""Raw damage by whole objects: stale copies, objects in the place of others, objects twice, folders that are gone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from cutline.snapshots.records.documents import seal
from tests.damage_matrix.damaged import Damaged
from tests.damage_matrix.families.raw import commit_of
from tests.damage_matrix.kinds import CHAINS, DAMAGED, PAIRS, SINGLE, Expected, FleetName, Hidden, Kind, found

STALE, EXCHANGED, DOUBLED, GONE = (
    "raw: stale copies",
    "raw: exchanged objects",
    "raw: objects twice",
    "raw: several objects gone",
)
Key = Callable[[Damaged], str]
NOT_LISTED = "no commit lists the object, so it does not exist for a reader"
OTHER = {PAIRS: SINGLE, SINGLE: PAIRS}


def kinds() -> Iterator[Kind]:
    """Yield the kinds of these families."""
    yield from _stale()
    yield from _exchanged()
    yield from _doubled()
    yield from _gone()


def segment(node: str, increment: int) -> Key:
    return lambda store: str(store.segment(node, increment)["key"])


def listed(kind: str, node: str, increment: int) -> Key:
    return lambda store: str(store.entry(kind, node, increment)["key"])


def commit(increment: int) -> Key:
    return lambda store: commit_of(store, increment)


def in_other_snapshot(of_this: Key) -> Key:
    """The same object of the snapshot that has the other name."""

    def key(store: Damaged) -> str:
        other = Damaged.open(store.root, OTHER[store.name])  # type: ignore[index]
        return of_this(other)

    return key


def _stale() -> Iterator[Kind]:
    replaced: Mapping[str, tuple[FleetName, Key, Key]] = {
        "a commit by the one before": (PAIRS, commit(2), commit(1)),
        "the newest commit by the one before": (SINGLE, commit(3), commit(2)),
        "a full snapshot's commit by another's": (PAIRS, commit(0), in_other_snapshot(commit(0))),
        "an increment's commit by another snapshot's": (SINGLE, commit(2), in_other_snapshot(commit(2))),
        "a segment by the one before": (PAIRS, segment("s1", 2), segment("s1", 1)),
        "a segment by another shard's": (SINGLE, segment("s1", 2), segment("s2", 2)),
        "a segment by the standby's": (PAIRS, segment("s2", 2), segment("s2-b1", 2)),
        "a segment by another snapshot's": (SINGLE, segment("s1", 1), in_other_snapshot(segment("s1", 1))),
        "a base copy by the one before": (PAIRS, listed("base", "s1", 1), listed("base", "s1", 0)),
        "a base copy by another shard's": (SINGLE, listed("base", "s1", 0), listed("base", "s2", 0)),
        "the DDL by the one before": (PAIRS, listed("archive", "s1", 2), listed("archive", "s1", 1)),
        "the DDL by another shard's": (SINGLE, listed("archive", "s1", 2), listed("archive", "s2", 2)),
        # The DDL of the same time would be the same, if both snapshots were taken in one second.
        "the DDL by another snapshot's": (SINGLE, listed("archive", "s1", 2),
                                          in_other_snapshot(listed("archive", "s1", 0))),
        "the globals by the DDL": (SINGLE, listed("globals", "s1", 0), listed("archive", "s1", 0)),
        "a list by another shard's": (SINGLE, lambda store: str(store.list_of("base", "s1")["key"]),
                                      lambda store: str(store.list_of("base", "s2")["key"])),
        "an outcome by another's": (PAIRS, lambda store: store.operation_key("outcome", 2),
                                    lambda store: store.operation_key("outcome", 1)),
    }  # fmt: skip
    for name, (fleet, key, by) in replaced.items():

        def damage(store: Damaged, key: Key = key, by: Key = by) -> None:
            store.damage(key(store), lambda _: store.read(by(store)))

        yield Kind(name, STALE, fleet, damage, _of_object(name))


def _of_object(name: str) -> Expected:
    if "commit" in name:
        return found("commit")
    if "outcome" in name:
        return found("operation", object=DAMAGED)
    return found("size", "digest", object=DAMAGED)


def _exchanged() -> Iterator[Kind]:
    pairs: Mapping[str, tuple[FleetName, Key, Key]] = {
        "two commits": (PAIRS, commit(1), commit(2)),
        "the commits of two snapshots": (SINGLE, commit(1), in_other_snapshot(commit(1))),
        "the segments of two shards": (PAIRS, segment("s1", 2), segment("s2", 2)),
        "the segments of a primary and its standby": (PAIRS, segment("s1", 2), segment("s1-b1", 2)),
        "two segments of a node": (SINGLE, segment("s1", 2), segment("s1", 1)),
        "the segments of two snapshots": (SINGLE, segment("s2", 2), in_other_snapshot(segment("s2", 2))),
        "the base copies of two shards": (PAIRS, listed("base", "s1", 0), listed("base", "s2", 0)),
        "two base copies of a node": (SINGLE, listed("base", "s1", 0), listed("base", "s1", 1)),
        "the DDL of two shards": (PAIRS, listed("archive", "s1", 2), listed("archive", "s2", 2)),
        "two dumps of a shard": (SINGLE, listed("archive", "s1", 0), listed("archive", "s1", 2)),
    }
    for name, (fleet, key, other) in pairs.items():

        def damage(store: Damaged, key: Key = key, other: Key = other) -> None:
            store.exchange(key(store), other(store))

        yield Kind(name, EXCHANGED, fleet, damage, _of_object(name))


def _copying(key: Key, to: Callable[[Damaged], str]) -> Callable[[Damaged], None]:
    return lambda store: store.write(to(store), store.read(key(store)))


def _doubled() -> Iterator[Kind]:
    hidden: Mapping[str, tuple[Key, Callable[[Damaged], str]]] = {
        "a segment under the next number": (
            segment("s1", 3),
            lambda store: store.segment("s1", 3)["key"].replace(
                f"{store.segment('s1', 3)['number']:020d}", f"{store.segment('s1', 3)['number'] + 1:020d}"
            ),
        ),
        "a base copy under another name": (
            listed("base", "s1", 0), lambda store: store.entry("base", "s1", 0)["key"].replace("part-", "part-9")
        ),
        "the DDL under another name": (
            listed("archive", "s1", 0), lambda store: store.entry("archive", "s1", 0)["key"].replace("archive-", "old-")
        ),
        "a full snapshot's commit in a second turn": (
            commit(0), lambda store: commit_of(store, 0).replace(".json", ".2.json")
        ),
        "an increment's commit in a second turn": (
            commit(2), lambda store: commit_of(store, 2).replace(".json", ".2.json")
        ),
        "a commit in a folder of its own": (commit(0), lambda store: "snapshots/copied-here/notes/snapshot.json"),
    }  # fmt: skip
    for name, (key, to) in hidden.items():
        for fleet in CHAINS:
            yield Kind(name, DOUBLED, fleet, _copying(key, to), Hidden(NOT_LISTED, is_same=True))
    for fleet in CHAINS:
        yield Kind("the newest commit as the next increment", DOUBLED, fleet,
                   _copying(commit(3), lambda store: commit_of(store, 4)), found("commit"))  # fmt: skip
        yield Kind("an earlier commit as the next increment", DOUBLED, fleet,
                   _copying(commit(1), lambda store: commit_of(store, 4)), found("commit"))  # fmt: skip
        yield Kind("the full snapshot's commit as the next increment", DOUBLED, fleet,
                   _copying(commit(0), lambda store: commit_of(store, 4)), found("commit"))  # fmt: skip

    def void(store: Damaged) -> None:
        store.write(commit_of(store, 4), seal(
            {"schema": "cutline/void/1", "snapshot": store.name, "increment": 4, "voids": "20260101T000000Z-0123456789"}
        ))  # fmt: skip

    yield Kind("a void of the next increment", DOUBLED, PAIRS, void,
               Hidden("a create that failed leaves the same", is_same=True))  # fmt: skip


def _gone() -> Iterator[Kind]:
    def losing(folder: str) -> Callable[[Damaged], None]:
        return lambda store: store.remove_folder(folder.format(name=store.name))

    folders: Mapping[str, tuple[str, tuple[str, ...]]] = {
        "all segments of a primary": ("snapshots/{name}/wal/s1", ("missing",)),
        "all segments": ("snapshots/{name}/wal", ("missing",)),
        "all base copies of a shard's primary": ("snapshots/{name}/base/s1", ("missing",)),
        "all base copies": ("snapshots/{name}/base", ("missing",)),
        "all DDL": ("snapshots/{name}/schema", ("missing",)),
        "all increments' commits": ("snapshots/{name}/increments", ("missing", "commit")),
        "the snapshot": ("snapshots/{name}", ("commit",)),
        "all snapshots": ("snapshots", ("commit",)),
    }
    for name, (folder, kinds_found) in folders.items():
        for fleet in CHAINS:
            yield Kind(name, GONE, fleet, losing(folder), found(*kinds_found))
    yield Kind("all segments of a standby", GONE, PAIRS, losing("snapshots/{name}/wal/s2-b1"),
               found("missing", node="s2-b1"))  # fmt: skip
    yield Kind("all lists", GONE, SINGLE, losing("snapshots/{name}/lists"), found("missing"))

    def both_copies(store: Damaged) -> None:
        for node in ("s1", "s1-b1"):
            store.remove(store.entry("base", node, 0)["key"])

    yield Kind("both base copies of a shard", GONE, PAIRS, both_copies, found("missing", node="s1-b1", object=DAMAGED))

    def on_two_shards(store: Damaged) -> None:
        store.remove(store.entry("base", "s1", 0)["key"])
        store.remove(store.segment("s2-b1", 2)["key"])

    yield Kind("an object of a primary and one of another shard's standby", GONE, PAIRS, on_two_shards,
               found("missing", node="s2-b1", object=DAMAGED))  # fmt: skip
    for number in (0, 1, 2):
        yield Kind(f"the commits from increment {number} on", GONE, SINGLE, _lose_from(number),
                   found("missing", "commit"))  # fmt: skip


def _lose_from(number: int) -> Callable[[Damaged], None]:
    def damage(store: Damaged) -> None:
        for increment in range(number, len(store.commits)):
            store.remove(commit_of(store, increment))

    return damage
