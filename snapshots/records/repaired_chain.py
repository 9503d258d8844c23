"""Apply repairs to a chain: the entries of replaced objects give way to those of the new objects.

A repair is trusted only as far as the chain confirms it: it names the commit by its digest, and the replaced objects by
key and digest, as the commit or an earlier repair lists them. The new objects must belong to the same node and part of
the commit, and contain rows of the same groups. A segment must have the same number and range of WAL as the segment
that it replaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias, TypeVar

from msgspec import Struct, structs
from msgspec.structs import replace

from cutline.snapshots.records.chain import AppliedRepairs, Chain
from cutline.snapshots.records.commit import (
    LARGE_OBJECTS,
    WITHOUT_ROWS,
    Commit,
    FullSnapshot,
    ListedObjects,
    NamedObject,
    ObjectList,
    StoredObject,
    dead_digest,
)
from cutline.snapshots.records.documents import checking
from cutline.snapshots.records.repair_records import Repair, Replacement, read_repairs, repair_key
from cutline.storage.store import ObjectStore
from cutline.wal.segments.archive import Segment

C = TypeVar("C", bound=Commit)
Entry: TypeAlias = NamedObject | Segment
# The parts of a commit that list objects.
COPIES, CHANGES, EXTENSIONS, SEGMENTS = "objects", "schema_changes", "extension_rows", "segments"


def with_repairs(store: ObjectStore, chain: Chain) -> Chain:
    """Return the chain with its repairs applied; raise ManifestError if a repair does not fit the chain."""
    return apply_repairs(chain, read_repairs(store, chain.name))


def apply_repairs(chain: Chain, repairs: tuple[Repair, ...]) -> Chain:
    """Apply the repairs in order, except for commits that the chain does not contain; see with_repairs."""
    for repair in repairs:
        with checking(repair_key(chain.name, repair.number)):
            if repair.chain != chain.full.chain:
                raise ValueError("it belongs to another chain")
            for replacement in repair.replacements:
                chain = _apply(chain, replacement)
    return replace(chain, applied=replace(chain.applied, repairs=repairs)) if repairs else chain


def _apply(chain: Chain, replacement: Replacement) -> Chain:
    if len({one.key for one in replacement.replaced}) < len(replacement.replaced):
        raise ValueError("it replaces an object twice")
    # A partial chain may lack the commit that lists the last segment of an idle node.
    full = _with_last(chain.full, replacement)
    chain = replace(chain, full=full, increments=tuple(_with_last(one, replacement) for one in chain.increments))
    if replacement.merge and (chain.beginning is None or chain.beginning.merge.digest != replacement.merge):
        return _apply_elsewhere(chain, replacement) if replacement.has_same_content else chain
    if chain.beginning is not None and replacement.increment <= full.increment:
        return _apply_to_beginning(chain, replacement)
    commit = next((one for one in chain.commits if one.increment == replacement.increment), None)
    if commit is None:
        return chain
    if commit.digest != replacement.commit:
        raise ValueError(f"it names a different commit of increment {replacement.increment}")
    return _exchange_in(chain, commit, replacement)


def _apply_elsewhere(chain: Chain, replacement: Replacement) -> Chain:
    """Replace objects that a merge lists in a chain that does not begin with it, wherever they are listed.

    A merge lists DDL, server globals, large objects and segments of the commits before it, and so does the next merge.
    No key is ever used again. Rows that were rebuilt are those at the position of the merge, so they count only there.
    """
    for commit in chain.commits:
        if commit is chain.full or commit.increment <= replacement.increment:
            chain = _apply_if_listed(chain, commit, replacement)
    return chain


def _apply_to_beginning(chain: Chain, replacement: Replacement) -> Chain:
    """Replace objects that a merge carries; it lists those of earlier repairs itself.

    New objects have the rows of all objects that they replace, so they can only replace all of them together. If they
    were rebuilt, they have exactly the rows that were living when they were, and don't replace objects that a merge,
    perhaps one of another store, has carried with other dead rows.
    """
    return _apply_if_listed(chain, chain.full, replacement)


def _apply_if_listed(chain: Chain, commit: Commit, replacement: Replacement) -> Chain:
    """Replace objects of the commit, if it lists all of them."""
    parts = parts_of(commit)
    if replacement.segments:
        # Segments are replaced one by one, and the merge lists only the last ones of an archive.
        replaced = tuple(one for one in replacement.replaced if one.key in parts)
        numbers = {entry.number for one in replaced if isinstance(entry := parts[one.key][1], Segment)}
        kept = tuple(segment for segment in replacement.segments if segment.number in numbers)
        replacement = structs.replace(replacement, replaced=replaced, segments=kept)
    if not replacement.replaced:
        return chain
    if not all((one.list or one.key) in parts for one in replacement.replaced):
        return chain
    if not replacement.has_same_content and any(
        one.dead != dead_digest(parts[one.key][1]) for one in replacement.replaced if not one.list
    ):
        # Rows that have died since then would be part of the state again. So the object itself is needed here.
        return chain
    return _exchange_in(chain, commit, replacement)


def _exchange_in(chain: Chain, commit: Commit, replacement: Replacement) -> Chain:
    old = _find_replaced(commit, replacement)
    # A merge may list rows of a table under several definitions; a repair stores them under the newest.
    is_merged = chain.beginning is not None and commit is chain.full
    _check_new(replacement, old, chain.successions(replacement.node) if is_merged else {})
    applied = _note(chain.applied, replacement, old)
    if isinstance(commit, FullSnapshot):
        return replace(chain, full=_replaced(commit, replacement, old), applied=applied)
    increments = tuple(_replaced(one, replacement, old) if one is commit else one for one in chain.increments)
    return replace(chain, increments=increments, applied=applied)


class _Replaced(Struct, frozen=True):
    """The commit's entries that are replaced, and the lists that keep listing other objects; all are in one `part`."""

    part: str
    entries: tuple[Entry, ...]
    lists: tuple[ObjectList, ...]

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(entry.key for entry in self.entries)


def _find_replaced(commit: Commit, replacement: Replacement) -> _Replaced:
    parts = parts_of(commit)
    entries: list[Entry] = []
    lists: dict[str, ObjectList] = {}
    found: set[str] = set()
    for one in replacement.replaced:
        part, entry = parts.get(one.list or one.key, ("", None))
        if entry is None or entry.node != replacement.node:
            raise ValueError(f"it replaces object {one.key}, which the commit does not list for {replacement.node}")
        found.add(part)
        if not one.list:
            if entry.digest != one.digest:
                raise ValueError(f"it replaces an object {one.key} with a different digest")
            entries.append(entry)
        elif isinstance(entry, ObjectList):
            lists[entry.key] = entry
        else:
            raise ValueError(f"{one.list} is not an object list")
    if len(found) > 1:
        raise ValueError("it replaces objects in different parts of the commit")
    return _Replaced(found.pop(), tuple(entries), tuple(lists.values()))


def parts_of(commit: Commit) -> dict[str, tuple[str, Entry]]:
    """Return the part and the entry of every key that the commit names."""
    found: dict[str, tuple[str, Entry]] = {}

    def add(part: str, entries: Iterable[Entry]) -> None:
        found.update({entry.key: (part, entry) for entry in entries})

    if isinstance(commit, FullSnapshot):
        add(COPIES, (*commit.copied, *commit.lists))
    if changes := commit.definition_changes:
        add(CHANGES, (*changes.objects, *changes.lists))
    add(EXTENSIONS, commit.extension_rows)
    add(SEGMENTS, (segment for segments in commit.segments.values() for segment in segments))
    return found


def _check_new(replacement: Replacement, old: _Replaced, successions: Mapping[int, int]) -> None:
    """Raise ValueError unless the new objects can take the place of the old.

    Definitions that continue those of the old rows, according to `successions` (by the new number), are allowed.
    """
    if (old.part == SEGMENTS) != bool(replacement.segments):
        raise ValueError("it replaces segments by objects, or objects by segments")
    if old.part == SEGMENTS:
        was = {(one.number, one.after, one.through, one.open) for one in old.entries if isinstance(one, Segment)}
        now = {(one.number, one.after, one.through, one.open) for one in replacement.segments}
        if was != now or len(replacement.segments) != len(old.entries):
            raise ValueError("a new segment has a different number or range of WAL")
        return
    objects = [entry for entry in (*old.entries, *old.lists) if not isinstance(entry, Segment)]
    kinds, groups = {entry.kind for entry in objects}, {number for entry in objects for number in entry.rows}
    while more := {new for new, before in successions.items() if before in groups} - groups:
        groups |= more
    new = [entry for entry in replacement.new if not isinstance(entry, Segment)]
    if len(kinds) > 1 or {entry.kind for entry in new} - kinds:
        raise ValueError("a new object has a different kind")
    if any(not entry.rows.keys() <= groups for entry in new):
        raise ValueError("a new object contains rows of other groups")
    if kinds & {*WITHOUT_ROWS, LARGE_OBJECTS} and len(new) != len(replacement.replaced):
        raise ValueError("objects of this kind can only be replaced one by one")
    is_copy = replacement.has_same_content and not old.lists and all(isinstance(one, StoredObject) for one in objects)
    if is_copy and len(replacement.objects) != len(replacement.replaced):
        raise ValueError("objects with the same content can only be replaced one by one")


def _note(applied: AppliedRepairs, replacement: Replacement, old: _Replaced) -> AppliedRepairs:
    """Add what readers of object lists, and creates, need to know of a replacement."""
    listed = {key: dict(digests) for key, digests in applied.listed.items()}
    for one in replacement.replaced:
        if one.list:
            listed.setdefault(one.list, {})[one.key] = one.digest
    # A list that was read from another store still lists the objects that an earlier repair replaced.
    gone = [listed.pop(key) for key in old.keys if key in listed]
    if gone and replacement.lists:
        for new in replacement.lists:
            listed[new.key] = {key: digest for digests in gone for key, digest in digests.items()}
    was = {entry.number: entry for entry in old.entries if isinstance(entry, Segment)}
    originals = {new.key: applied.originals.get(was[new.number].key, was[new.number]) for new in replacement.segments}
    return replace(applied, listed=listed, originals={**applied.originals, **originals})


def _replaced(commit: C, replacement: Replacement, old: _Replaced) -> C:
    keys = old.keys
    if old.part == COPIES and isinstance(commit, FullSnapshot):
        replacement = _with_own_dead(replacement, old)
        own, lists = _exchange(commit.copied, commit.lists, replacement, keys)
        return structs.replace(commit, copied=own, lists=lists)
    if old.part == CHANGES and commit.definition_changes:
        changes = commit.definition_changes
        own, lists = _exchange(changes.objects, changes.lists, replacement, keys)
        return structs.replace(commit, definition_changes=structs.replace(changes, objects=own, lists=lists))
    if old.part == EXTENSIONS:
        own, _ = _exchange(commit.extension_rows, (), replacement, keys)
        return structs.replace(commit, extension_rows=own)
    by_number = {segment.number: segment for segment in replacement.segments}
    segments = tuple(by_number.get(segment.number, segment) for segment in commit.segments[replacement.node])
    return structs.replace(commit, segments={**commit.segments, replacement.node: segments})


def _with_own_dead(replacement: Replacement, old: _Replaced) -> Replacement:
    """Return the replacement with the dead rows that the replaced entries have, if they aren't those of the repair.

    Merges may carry an object with different dead rows. What a repair has stored again has the content of the object
    that it replaced, for all of them.
    """
    entries = {entry.key: entry for entry in old.entries if isinstance(entry, StoredObject)}
    objects = list(replacement.objects)
    for number, one in enumerate(replacement.replaced if replacement.has_same_content else ()):
        was = entries.get(one.key)
        if was is not None and dead_digest(was) != one.dead:
            objects[number] = structs.replace(objects[number], rows=was.rows, dead=was.dead)
    return structs.replace(replacement, objects=tuple(objects))


def _exchange(
    own: tuple[StoredObject, ...], lists: tuple[ObjectList, ...], replacement: Replacement, keys: frozenset[str]
) -> tuple[tuple[StoredObject, ...], tuple[ObjectList, ...]]:
    kept = tuple(one for one in own if one.key not in keys)
    kept_lists = tuple(one for one in lists if one.key not in keys)
    return (*kept, *replacement.objects), (*kept_lists, *replacement.lists)


def _with_last(commit: C, replacement: Replacement) -> C:
    """Replace the segment with which the archive of an idle or absent node ended."""
    last = commit.end_of_archive(replacement.node)
    if last is None or not replacement.segments:
        return commit
    if not any((one.key, one.digest) == (last.key, last.digest) for one in replacement.replaced):
        return commit
    new, node = next((one for one in replacement.segments if one.number == last.number), last), replacement.node
    if node in commit.absent:
        return structs.replace(commit, absent={**commit.absent, node: structs.replace(commit.absent[node], last=new)})
    return structs.replace(commit, idle={**commit.idle, node: new})


def without_replaced(listed: ListedObjects, replaced: Mapping[str, str]) -> ListedObjects:
    """Return the list without the objects that repairs replaced (digests by key).

    Raises ValueError unless it lists all of them.
    """
    found = {stored.key: stored.digest for stored in listed.objects if stored.key in replaced}
    if found != dict(replaced):
        raise ValueError("a repair replaces objects that the list does not contain")
    return structs.replace(listed, objects=tuple(stored for stored in listed.objects if stored.key not in replaced))
