"""Copies of standbys that are made between increments (snapshots/create/background_copies.py): what is copied so far.

Each step of such a copy copies some tables at one position, and stores a `CopyStep` after all of their objects. An
object without a step, of a task that died, is in no copy. The newest commit says which copy of a standby is being made
(BackgroundCopy); steps and objects of any other are garbage.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from msgspec import Struct

from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Record
from cutline.snapshots.records.commit import NamedObject, ObjectList, StoredObject
from cutline.snapshots.records.documents import ManifestError, check_about, read_sealed, seal
from cutline.storage.store import ObjectMissingError, ObjectStore
from cutline.storage.storing import create_or_find

STEP_FORMAT = "cutline/copy-step/1"
THREADS_MAX = 16


class CopyStep(Record, frozen=True, kw_only=True, tag_field="schema", tag=STEP_FORMAT):
    """The tables of `node` that were copied at `position`, for the copy that `operation` began, and their objects.

    `rows` has the number of rows of each table, by group number. The tables had `bytes` on the server.
    """

    snapshot: str
    operation: str
    node: str
    position: Lsn
    rows: dict[int, Count]
    bytes: Count
    objects: tuple[StoredObject, ...]
    lists: tuple[ObjectList, ...] = ()

    @property
    def entries(self) -> tuple[NamedObject, ...]:
        """`objects` and `lists`."""
        return (*self.objects, *self.lists)


def steps_prefix(snapshot: str, node: str, operation: str) -> str:
    """Return the folder of the steps of a copy."""
    return f"snapshots/{snapshot}/copies/{node}/{operation}"


def store_step(store: ObjectStore, step: CopyStep) -> None:
    """Store a step; all of its objects are stored."""
    folder = steps_prefix(step.snapshot, step.node, step.operation)
    create_or_find(store, f"{folder}/{step.position:016x}-{secrets.token_hex(4)}.json", seal(step))


def read_steps(
    store: ObjectStore, snapshot: str, node: str, operation: str, known: dict[str, CopyStep] | None = None
) -> tuple[CopyStep, ...]:
    """Read the steps of a copy, in the order of their positions. A step that can't be read is left out.

    Those that are `known`, by name, are not read again; the others are added to them.
    """
    folder, known = steps_prefix(snapshot, node, operation), {} if known is None else known

    def read(name: str) -> CopyStep | None:
        if (found := known.get(name)) is not None:
            return found
        with suppress(ManifestError, ObjectMissingError):
            key = f"{folder}/{name}"
            step: CopyStep = read_sealed(store, key, CopyStep)
            about, expected = (step.snapshot, step.node, step.operation), (snapshot, node, operation)
            check_about(key, " ".join(about), " ".join(expected))
            return known.setdefault(name, step)
        return None

    with ThreadPoolExecutor(THREADS_MAX) as threads:
        return tuple(step for step in threads.map(read, sorted(store.list_children(folder))) if step is not None)


class StepsCopied(Struct, frozen=True):
    """What the `steps` of a copy have copied of the tables of its shard, which have the numbers `missing` otherwise.

    `copied` maps the number under which rows are stored to the number of the table at the last commit.
    """

    steps: tuple[CopyStep, ...]
    copied: Mapping[int, int]
    missing: frozenset[int]

    @property
    def bytes(self) -> int:
        """The bytes of the tables that were copied, those that are gone by now included."""
        return sum(step.bytes for step in self.steps)


def find_copied(steps: Sequence[CopyStep], numbers_at_cut: Mapping[int, int], wanted: Iterable[int]) -> StepsCopied:
    """Return which tables the steps have copied.

    `numbers_at_cut` has the numbers at the last commit by those under which valid rows may be stored (Chain), and
    `wanted` are the tables at the last commit. No table is in two of the steps that count: two creates that knew
    nothing of each other may have copied it.
    """
    used: list[CopyStep] = []
    copied: dict[int, int] = {}
    done = set[int]()
    for step in steps:
        valid = {stored: numbers_at_cut[stored] for stored in step.rows if stored in numbers_at_cut}
        if valid and not done.intersection(valid.values()):
            used.append(step)
            copied |= valid
            done.update(valid.values())
    return StepsCopied(tuple(used), copied, frozenset(wanted) - done)
