"""Repairs: documents that replace damaged objects of a chain by new objects.

Commits never change, each names the digest of the commit before it, and no object is overwritten. So a damaged object
stays where it is, and a repair says which objects supersede it. Every command that reads a chain applies its repairs
(snapshots/records/repaired_chain.py). Objects that a repair stores belong to its operation, like those of a create.

The repairs of a snapshot are numbered from 1 and read by key, up to the first number that is not taken. A repair that
died before its put gets a void in its place (snapshots/operations/committing.py); readers skip voids. Each repair
contains the digest of the repair before it, so none can be exchanged or left out.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import field, structs

from cutline.fleet.record import Count, Record, Time
from cutline.snapshots.records.commit import BASE, LARGE_OBJECTS, ObjectList, StoredObject, parts_of_entries
from cutline.snapshots.records.documents import (
    Kind,
    ManifestError,
    check_about,
    checking,
    parse_document,
    parse_key,
    read_body,
    unseal,
)
from cutline.storage.store import ObjectMissingError, ObjectStore, check_key
from cutline.wal.segments.archive import Segment

REPAIR_FORMAT, REPAIR_VOID_FORMAT = "cutline/repair/1", "cutline/repair-void/1"
# The `damage` of an object that was replaced together with a damaged object, although it is intact.
INTACT = "intact"


class ReplacedObject(Record, frozen=True, omit_defaults=True):
    """An object that a repair replaces, with its digest from the commit.

    `damage` is a kind of ObjectDamagedError, or INTACT. `list` is the key of the object list that lists the object; ""
    if the commit lists it itself. `dead` is the digest of the object that lists its dead rows, if there is one.
    """

    key: str
    digest: str
    damage: str
    list: str = ""
    dead: str = ""


class Replacement(Record, frozen=True, kw_only=True, omit_defaults=True):
    """New objects that supersede objects of a node in the commit of `increment`, whose digest is `commit`.

    All replaced objects are listed in the same part of the commit. A segment is replaced by a segment with the same
    number and range of WAL. If the chain began with a merge at this increment when it was repaired, `merge` is its
    digest: then that lists the replaced objects. `copy` is the node from whose copy the new objects were made; if it is
    "", they have the same content as the replaced objects, and were read from another store.
    """

    increment: Count
    commit: str
    node: str
    copy: str = ""
    merge: str = ""
    replaced: tuple[ReplacedObject, ...]
    objects: tuple[StoredObject, ...] = ()
    lists: tuple[ObjectList, ...] = ()
    segments: tuple[Segment, ...] = field(name="archived", default=())

    @property
    def new(self) -> tuple[StoredObject | ObjectList | Segment, ...]:
        """All new objects, those that list dead rows included."""
        return (*parts_of_entries(self.objects), *self.lists, *self.segments)

    @property
    def has_same_content(self) -> bool:
        """Whether the new objects have the content of the old ones, wherever these are listed.

        Rows that were rebuilt from another copy are those at the position with which the chain began.
        """
        return not self.copy or bool(self.segments)


class Repair(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema", tag=REPAIR_FORMAT):
    """Repair `number` of a snapshot, made by `operation`; `previous` is the digest of the repair before it, or "".

    `chain` is the chain's id, and `by` the label of the command. `digest` is stored in the file, and is "" until the
    file is written.
    """

    snapshot: str
    number: Count
    operation: str
    chain: str
    made_at: Time
    by: str
    previous: str
    replacements: tuple[Replacement, ...]
    digest: str = ""


class RepairVoid(Record, frozen=True, tag_field="schema", tag=REPAIR_VOID_FORMAT):
    """A document in the place of repair `number`, which prevents operation `voids` from storing it."""

    snapshot: str
    number: Count
    voids: str


RepairTurn: TypeAlias = Repair | RepairVoid


def repair_key(snapshot: str, number: int) -> str:
    """Return the key of repair `number` (from 1) of a snapshot."""
    return f"snapshots/{snapshot}/repairs/{number:016d}.json"


def read_repair(store: ObjectStore, snapshot: str, number: int) -> RepairTurn:
    """Read a repair, or the void in its place; raise ObjectMissingError or ManifestError."""
    key = repair_key(snapshot, number)
    content, digest = unseal(key, read_body(store, key))
    turn: RepairTurn = parse_document(key, content, Repair | RepairVoid)
    check_about(key, f"repair {turn.number} of {turn.snapshot}", f"repair {number} of {snapshot}")
    if isinstance(turn, RepairVoid):
        return turn
    with checking(key):
        check_repair(turn)
    return structs.replace(turn, digest=digest)


def read_repairs(store: ObjectStore, snapshot: str) -> tuple[Repair, ...]:
    """Read all repairs of a snapshot, in order; raise ManifestError if one of them can't be trusted."""
    repairs: list[Repair] = []
    number = 0
    while True:
        number += 1
        try:
            turn = read_repair(store, snapshot, number)
        except ObjectMissingError:
            return tuple(repairs)
        except ManifestError as error:
            error.hint = (
                f"{error.hint}; without that object, the snapshot is as it was before repair {number}: remove it and"
                f" those of later repairs, then run: snapshot repair {snapshot}"
            )
            raise
        if isinstance(turn, RepairVoid):
            continue
        previous = repairs[-1].digest if repairs else ""
        with checking(repair_key(snapshot, number)):
            if turn.previous != previous:
                raise ValueError("it does not follow the repair before it")
        repairs.append(turn)


def next_repair_number(store: ObjectStore, snapshot: str) -> int:
    """Return the first number without a repair or a void; raise ManifestError if one of them can't be read."""
    number = 1
    while True:
        try:
            read_repair(store, snapshot, number)
        except ObjectMissingError:
            return number
        number += 1


def check_repair(repair: Repair) -> None:
    """Raise ValueError unless every new object has a key of the repair's own, for its node and kind."""
    keys: set[str] = set()
    for one in repair.replacements:
        if not one.replaced or (one.segments and (one.objects or one.lists)):
            raise ValueError("a replacement replaces nothing, or objects of different kinds")
        for entry in one.new:
            parsed = parse_key(repair.snapshot, check_key(entry.key))
            if parsed is None or (parsed.owner, parsed.node) != (repair.operation, one.node) or entry.node != one.node:
                raise ValueError(
                    f"object {entry.key} does not belong to node {one.node} of operation {repair.operation}"
                )
            if parsed.kind is not _folder_of(entry) or (isinstance(entry, Segment) and parsed.number != entry.number):
                raise ValueError(f"object {entry.key} has a key of another kind")
            if entry.key in keys:
                raise ValueError(f"object {entry.key} occurs twice")
            keys.add(entry.key)


def _folder_of(entry: StoredObject | ObjectList | Segment) -> Kind:
    if isinstance(entry, Segment):
        return Kind.SEGMENT
    if isinstance(entry, ObjectList):
        return Kind.LIST
    return Kind.BASE if entry.kind in (BASE, LARGE_OBJECTS) else Kind.SCHEMA
