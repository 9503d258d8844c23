"""Commits: the documents that make full snapshots and increments exist, and the types of their entries.

A commit lists every object of its snapshot or increment with its size and digest, either itself or in *object lists*.
It is written once, as the last step. For Cutline, an object that no commit lists does not exist (docs/architecture.md,
invariant 1). The types here define the fields of a commit; `proven_chains` checks the rules that types can't express.

The stored objects of kind LARGE_OBJECTS contain parts of large objects in the order in which they were read
(snapshots/base_copy/large_objects.py). The row of a large object's first part contains its definition as JSON. Because
a restore turns the definition into SQL, it is parsed strictly, in one place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Annotated, Any, Literal, Self, TypeAlias, TypeVar

import msgspec
import zstandard
from msgspec import field, structs

from cutline.fleet.config import NODE_ID, GroupRules
from cutline.fleet.lsn import Lsn
from cutline.fleet.record import Count, Integer, Record, Seconds, Time, from_json, to_json
from cutline.fleet.timeline_history import TimelineHistory
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from cutline.nodes.left_out import LeftOut, mark_large_objects
from cutline.nodes.table_state import TableState
from cutline.snapshots.records.documents import shortened
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.segments.archive import Segment

LIST_FORMAT = "cutline/objects/1"
BASE = "base"
# The DDL of a shard: one pg_dump archive.
DDL = "archive"
# The globals of a shard's server (snapshots/records/server_globals.py).
GLOBALS = "globals"
# The rows of extension configuration tables (snapshots/records/kinds.py).
EXTENSION_ROWS = "extension-rows"
# Why the copy of a standby is absent that was removed from fleet.toml.
UNLISTED = "it is no longer in fleet.toml"
# The kinds of objects that contain no rows of groups. A commit lists only a few such objects.
WITHOUT_ROWS = (DDL, GLOBALS, EXTENSION_ROWS)
# In an entry of this kind, `rows` contains only this number, with the count of large objects that begin in the object.
LARGE_OBJECTS, LARGE_OBJECTS_COUNT = "large_objects", 0


class DeadRows(Record, frozen=True):
    """An object that lists the dead rows of a base object, and their number (snapshots/fold/dead_rows.py)."""

    key: str
    size: Count
    digest: str
    rows: Count


class StoredObject(Record, frozen=True, omit_defaults=True):
    """A stored object: part of a base copy, or facts about a shard. `rows` counts rows by group number.

    An object that a merge carries may contain `dead` rows, which are no longer part of the state. They are not among
    `rows`, and no reader returns them.
    """

    key: str
    kind: str
    node: str
    size: Count
    digest: str
    rows: dict[int, Count]
    dead: DeadRows | None = None

    @property
    def parts(self) -> tuple[StoredObject, ...]:
        """The object itself and, if it contains dead rows, the object that lists them, as an entry of the same kind.

        Without either of them, the `rows` are lost.
        """
        if self.dead is None:
            return (self,)
        return (
            structs.replace(self, dead=None),
            StoredObject(self.dead.key, self.kind, self.node, self.dead.size, self.dead.digest, self.rows),
        )

    @property
    def keys(self) -> frozenset[str]:
        """The keys of its parts."""
        return frozenset([self.key, self.dead.key] if self.dead else [self.key])

    @property
    def stored_bytes(self) -> int:
        """The bytes of its parts."""
        return self.size + (self.dead.size if self.dead else 0)


class ObjectList(Record, frozen=True, omit_defaults=True):
    """A commit's entry for an object list.

    `size` and `digest` are the list's own. `objects`, `bytes` and `rows` (by group number) are totals of the listed
    objects, which all have the same `kind` and `node`. `dead` of them contain dead rows; `bytes` includes the objects
    that list these.
    """

    key: str
    kind: str
    node: str
    size: Count
    digest: str
    objects: Count
    bytes: Count
    rows: dict[int, Count]
    dead: Count = 0

    @property
    def parts(self) -> int:
        """The number of all objects in the list, those that list dead rows included."""
        return self.objects + self.dead


class ReadList(ObjectList, frozen=True):
    """An entry with its list's compressed document, as `read_lists` returns it. Never stored.

    The parsed lists of a large fleet would take ten times the memory.
    """

    content: bytes = b""


class LostList(ObjectList, frozen=True):
    """An entry whose list can't be read, with the damage as ObjectDamagedError describes it. Never stored."""

    damage: str = ""
    detail: str = ""


class ListedObjects(Record, frozen=True, tag_field="schema", tag=LIST_FORMAT):
    """An object list: the document that an ObjectList names, stored by `operation`."""

    snapshot: str
    operation: str
    objects: tuple[StoredObject, ...]


NamedObject: TypeAlias = StoredObject | ObjectList


def split_entries(entries: Iterable[NamedObject]) -> tuple[tuple[StoredObject, ...], tuple[ObjectList, ...]]:
    """Split the entries into objects and lists."""
    entries = list(entries)
    objects = tuple(entry for entry in entries if isinstance(entry, StoredObject))
    return objects, tuple(entry for entry in entries if isinstance(entry, ObjectList))


def compress_content(content: bytes) -> bytes:
    """Compress a list's document for its ReadList."""
    # Copy the result, because the compressor's buffer has room for incompressible content.
    return bytes(memoryview(zstandard.compress(content)))


def listed_objects(one: NamedObject) -> tuple[StoredObject, ...]:
    """Return the object itself, or a list's entries (none if it is lost); raise RuntimeError if it was not read."""
    if isinstance(one, StoredObject):
        return (one,)
    if isinstance(one, ReadList):
        found: ListedObjects = from_json(zstandard.decompress(one.content), ListedObjects)
        return found.objects
    if isinstance(one, LostList):
        return ()
    raise RuntimeError(f"object list {one.key} was not read")


T = TypeVar("T")


def parts_of_entries(entries: Iterable[T]) -> Iterator[T | StoredObject]:
    """Yield the entries, each object followed by the object that lists its dead rows."""
    for entry in entries:
        if isinstance(entry, StoredObject):
            yield from entry.parts
        else:
            yield entry


def dead_digest(entry: object) -> str:
    """Return the digest of the object that lists the dead rows of the entry's object; "" if there is none."""
    return entry.dead.digest if isinstance(entry, StoredObject) and entry.dead else ""


NO_LIMIT = -1


class UsedCollation(Record, frozen=True, omit_defaults=True):
    """A collation that the database uses, or that was created in it.

    If `is_own`, the DDL creates the collation; otherwise the server must have a collation of the same name. `provider`
    is as in pg_collation. `locales` lists the locales that the machine or ICU must provide.
    """

    schema: str
    name: str
    provider: str
    locales: tuple[str, ...]
    is_own: bool = False


class DatabaseSetting(Record, frozen=True, omit_defaults=True):
    """A setting of the database (ALTER DATABASE … SET), or of `role` in it; `value` is as in pg_db_role_setting."""

    name: str
    value: str
    role: str = ""


class DatabasePrivilege(Record, frozen=True, omit_defaults=True):
    """A privilege on the database; the `grantee` "" is PUBLIC."""

    grantor: str
    grantee: str
    privilege: Literal["CREATE", "TEMPORARY", "CONNECT"]
    with_grant_option: bool = False


class SecurityLabel(Record, frozen=True):
    """A security label on the database."""

    provider: str
    label: str


class DatabaseProperties(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The properties of a database itself, not of its contents.

    `tablespace` is "" for pg_default. If `privileges` is None, the database has the default privileges.
    """

    owner: str
    comment: str | None = None
    tablespace: str = ""
    connection_limit: int = NO_LIMIT
    is_template: bool = False
    privileges: tuple[DatabasePrivilege, ...] | None = None
    settings: tuple[DatabaseSetting, ...] = ()
    labels: tuple[SecurityLabel, ...] = ()


class DatabaseFacts(Record, frozen=True, omit_defaults=True):
    """A shard's database right after the cut: its size, its extensions with their versions, and its collations.

    `lz4_columns` lists the columns whose values are compressed with lz4, as `schema.table.column`. `name` is the name
    of the database, which may have changed since it was copied; early versions did not record it. `session_settings`
    are the values that the server and the database, but no role, give a session's settings on which computed values may
    depend, by name.
    """

    size_bytes: Count
    extensions: dict[str, str] = field(default_factory=dict)
    collations: tuple[UsedCollation, ...] = ()
    lz4_columns: tuple[str, ...] = ()
    properties: DatabaseProperties | None = None
    name: str = ""
    session_settings: dict[str, str] = field(default_factory=dict)


FULL_FORMAT, INCREMENT_FORMAT, VOID_FORMAT = "cutline/snapshot/2", "cutline/increment/2", "cutline/void/1"
# The maximum number of increments that a commit summarizes; their summaries take 22 KB without comments. `list` reads
# one commit in 64.
SUMMARIZED_MAX = 64
# The number of groups, in all shards, from which a full snapshot's commit contains equal groups and equal lists of
# columns only once.
SHARED_FROM = 2000
# The maximum length of a summary's comment, in characters.
COMMENT_MAX = 1000


class Sequence(Record, frozen=True, omit_defaults=True):
    """The state of a sequence: at or beyond every value that was handed out before the cut.

    If `is_called` is false, the next value is `last_value` itself. `smallest` and `largest` bound its values. If
    `is_of_extension`, an extension creates it, and the DDL does not.
    """

    schema: str
    name: str
    last_value: Integer
    is_called: bool
    increment: Integer
    cycles: bool
    smallest: Integer
    largest: Integer
    is_of_extension: bool = False

    @property
    def reach(self) -> tuple[int, bool]:
        """How far the sequence has come, in the direction of its increment: a later state compares as greater."""
        return (self.last_value if self.increment > 0 else -self.last_value), self.is_called


class CutRecord(Record, frozen=True, kw_only=True):
    """A resolved cut (`wal.cut.cut_values`), with its attempts and times.

    `causes` lists the reasons why earlier attempts failed. `seconds` is the time from the first start marker to the
    last finish marker. `made_at` is the time of the last finish marker according to the nodes' clocks
    (`snapshots.create.make_cut`): the cut contains nothing that was committed later. `safe_at` is the fleet's safe time
    (`wal.cut.safe_time`). The nodes' clocks differ by at most `skew_seconds`.
    """

    id: str
    attempts: Count
    causes: tuple[str, ...] = ()
    seconds: Seconds
    nodes: tuple[NodeCut, ...]
    global_transactions: Count
    included_early: Count
    in_flight: Count
    made_at: Time
    safe_at: Time
    skew_seconds: Seconds

    @property
    def by_node(self) -> dict[str, NodeCut]:
        """The cut of each primary."""
        return {node.node: node for node in self.nodes}

    def of(self, shard: str) -> NodeCut:
        """Return the cut of primary `shard`; raise KeyError if the cut does not include it."""
        for node in self.nodes:
            if node.node == shard:
                return node
        raise KeyError(shard)


class Previous(Record, frozen=True):
    """The commit before an increment: its operation and the digest of its file."""

    operation: str
    digest: str


class CommitSummary(Record, frozen=True, omit_defaults=True):
    """A summary of a commit, as `list` shows it, and the digest of the commit's file.

    `cut` is the id of the commit's cut, `cut_at` its time and `safe_at` its safe time.
    """

    increment: Count
    operation: str
    digest: str
    created_at: Time
    seconds: Seconds
    changes: Count
    transactions: Count
    bytes: Count
    cut: str
    cut_at: Time
    safe_at: Time
    comment: str = ""
    terminal: bool = False


class ChainHistory(Record, frozen=True, omit_defaults=True):
    """An increment's summary of the commits before it, so that only a few of them have to be read.

    `full` is the digest of the full snapshot's commit. `redefinitions` contains, by number, the digest of every
    increment that changed definitions or DDL, or copied nodes again. `recent` summarizes the increments starting at the
    last multiple of 64 (at 1, for the first 64), with comments of up to 1,000 characters. The commit at that multiple
    summarizes the increments before it.
    """

    full: str
    redefinitions: dict[int, str] = field(default_factory=dict)
    recent: tuple[CommitSummary, ...] = ()


class DefinitionChanges(Record, frozen=True, omit_defaults=True):
    """The changes to definitions and DDL since the previous commit, or since the base copy of a full snapshot.

    All mappings are keyed by shard, except `begun`, `copied` and `pending`, which are keyed by node. `groups` lists new
    definitions, and `gone` lists the numbers of definitions that ended. `successions` maps a new number to its
    predecessor; the tables of all other new numbers were copied again, and `copied` counts the rows of their base
    copies, so that none can get lost. `begun` holds the position from which changes under each new number count.
    `tables` contains only tables that changed; `roles` and `fingerprints` contain only shards whose catalogs changed.
    `objects` lists the objects of base copies and DDL, and `lists` names additional base copy objects. `readers` names
    the standbys on which the copied tables of primaries were read, by primary. `pending` has the positions of the
    transactions that were prepared before copies of tables and decided later: the copies lack their changes, which
    count.
    """

    groups: dict[str, tuple[Group, ...]] = field(default_factory=dict)
    gone: dict[str, tuple[Count, ...]] = field(default_factory=dict)
    successions: dict[str, dict[int, Count]] = field(default_factory=dict)
    begun: dict[str, dict[int, Lsn]] = field(default_factory=dict)
    copied: dict[str, dict[int, Count]] = field(default_factory=dict)
    tables: dict[str, tuple[TableState, ...]] = field(default_factory=dict)
    objects: tuple[StoredObject, ...] = ()
    roles: dict[str, tuple[str, ...]] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)
    lists: tuple[ObjectList, ...] = ()
    readers: dict[str, str] = field(default_factory=dict)
    pending: dict[str, tuple[Lsn, ...]] = field(default_factory=dict)


class AbsentCopy(Record, frozen=True, omit_defaults=True):
    """A standby's copy that an increment leaves out: it ends before the increment's cut.

    `since` is the first increment in a row that leaves the copy out, `reason` says why this one does, and `last` is the
    last segment in the standby's archive. If it `has_ended`, no later increment can continue the copy: WAL is lost that
    it needs, or tables have changed in the meantime.
    """

    since: Count
    reason: str
    last: Segment
    has_ended: bool = False


class LostWal(Record, frozen=True, omit_defaults=True):
    """WAL that a copy has and the server of its primary lacks, as after a failover.

    The server has the WAL of the copy up to `after` (0/0: it is not known up to where). `since` is the first restore
    point whose cut lies beyond that position: it and those that follow may hold transactions that are lost.
    """

    after: Lsn
    since: Count | None = None


class BackgroundCopy(Record, frozen=True, omit_defaults=True):
    """A copy of a standby that begins again, and whose tables are copied between increments: it is not complete yet.

    Increment `operation` began it, for this `reason`: it found the node as `identity`, on a timeline with these
    `switches`, and created the chain's slot there at `base`, where a new archive begins. `last` is the last segment of
    that archive at this commit. `copied` of `wanted` tables had been copied by then, which had `copied_bytes` of
    `wanted_bytes`.
    """

    operation: str
    base: Lsn
    identity: NodeIdentity
    reason: str
    last: Segment
    copied: Count
    wanted: Count
    copied_bytes: Count
    wanted_bytes: Count
    switches: dict[int, Lsn] = field(default_factory=dict)

    @property
    def timeline_history(self) -> TimelineHistory:
        """The history of the node's timeline, as it was found."""
        return TimelineHistory(self.identity.timeline, self.switches)


class CopiedLater(Record, frozen=True, omit_defaults=True):
    """Tables of a new copy that were copied at `position`, after the copy's base: changes of them count from there on.

    `numbers` are those of the definitions under which the rows are stored. The changes of the transactions at `pending`
    (ascending), which were prepared before the position and decided later, count as well.
    """

    position: Lsn
    numbers: tuple[Count, ...]
    pending: tuple[Lsn, ...] = ()


class Renewal(Record, frozen=True, omit_defaults=True):
    """A new beginning of a node's copy: the increment copied the node again, and began a new archive of its WAL.

    `identity` is the node as it was found, and `base` is the position of the copy, at which the archive begins.
    `reason` says why the copy that the chain had could not be continued. `copied` counts the rows that were copied, by
    group number, for all tables of the previous commit that continue. If the copy `is_new`, the chain had none of the
    node: a shard or a standby has joined it. `lost` is set if the copy before has WAL that a primary has lost.

    If the copy was made in the background of earlier increments, `began_by` is the operation of the increment that
    began it, which is in the keys of the archive and of the objects; `later` are its tables, which have the numbers of
    definitions that were in force when they were copied.
    """

    identity: NodeIdentity
    base: Lsn
    reason: str
    copied: dict[int, Count] = field(default_factory=dict)
    is_new: bool = False
    lost: LostWal | None = None
    began_by: str = ""
    later: tuple[CopiedLater, ...] = ()

    @property
    def complete_at(self) -> Lsn:
        """The position from which the copy has all of its tables."""
        return max((one.position for one in self.later), default=self.base)


class SharedBase(Record, frozen=True, omit_defaults=True):
    """A base copy of a primary that was read on its `standby`: the copies of both nodes begin with its objects.

    It has the rows at the standby's base position. Changes in the primary's archive count from there on, and so do
    those of the transactions at `pending` (ascending), which were prepared before it and decided later.
    """

    standby: str
    pending: tuple[Lsn, ...] = ()


class CommonPart(Record, frozen=True, kw_only=True, omit_defaults=True, tag_field="schema"):
    """The fields of both kinds of commit.

    `segments` lists the segments since the previous commit. For each node without such segments, `idle` holds the last
    segment in its archive, which an earlier commit lists: from the end of that segment to the cut, the node's WAL
    contains only markers. `absent` holds the standbys' copies that the commit leaves out instead. `copying` holds the
    copies of standbys that have begun again and are not complete yet. `timelines` holds the timelines of the nodes that
    are no longer on those of their copies, after promotions. `switches` holds where the earlier timelines in the
    histories of the nodes' timelines ended, if there are any and the servers still know. `renamed` holds the ids in
    fleet.toml of the nodes that the chain knows by others (fleet/chain_ids.py), those of retired shards included.
    `definition_changes` is None if neither definitions nor DDL changed. `previous` is None in a full snapshot and in
    early increments. `left_out` lists the parts of the primaries' databases that the commit does not cover. If
    `terminal`, the fleet was left read-only. `databases` holds the facts about each shard's database.
    `extension_rows` lists the objects with the rows of extension tables, one for each shard that has such rows; every
    commit stores all of them. `digest` is stored in the file, and is "" until the file is written.
    """

    snapshot: str
    increment: Count
    operation: str
    chain: str
    created_at: Time
    seconds: Seconds
    comment: str
    counts: dict[str, Count]
    cut: CutRecord
    sequences: dict[str, tuple[Sequence, ...]]
    segments: dict[str, tuple[Segment, ...]]
    idle: dict[str, Segment] = field(default_factory=dict)
    absent: dict[str, AbsentCopy] = field(default_factory=dict)
    copying: dict[str, BackgroundCopy] = field(default_factory=dict)
    timelines: dict[str, Count] = field(default_factory=dict)
    switches: dict[str, dict[int, Lsn]] = field(default_factory=dict)
    renamed: dict[str, Annotated[str, msgspec.Meta(pattern=NODE_ID)]] = field(default_factory=dict)
    previous: Previous | None = None
    left_out: tuple[LeftOut, ...] = ()
    terminal: bool = False
    definition_changes: DefinitionChanges | None = field(name="schema_changes", default=None)
    databases: dict[str, DatabaseFacts] = field(default_factory=dict)
    extension_rows: tuple[StoredObject, ...] = ()
    digest: str = ""

    @property
    def own_objects(self) -> tuple[StoredObject, ...]:
        """The objects that this document lists itself: those without rows of groups, and a few from base copies."""
        changed = self.definition_changes.objects if self.definition_changes else ()
        return (*changed, *self.extension_rows)

    @property
    def object_lists(self) -> tuple[ObjectList, ...]:
        """The lists of additional base copy objects."""
        return self.definition_changes.lists if self.definition_changes else ()

    def end_of_archive(self, node: str) -> Segment | None:
        """Return the last segment of a node's archive if that ends before the cut: the node is idle or absent."""
        return self.absent[node].last if node in self.absent else self.idle.get(node)

    @property
    def entries(self) -> tuple[NamedObject, ...]:
        """`own_objects` and `object_lists`."""
        return (*self.own_objects, *self.object_lists)

    @property
    def named(self) -> tuple[Segment | NamedObject, ...]:
        """All entries that this document names by key: segments, objects (all of their parts) and object lists."""
        segments = (segment for segments in self.segments.values() for segment in segments)
        return (*segments, *parts_of_entries(self.entries))

    @property
    def named_and_listed(self) -> Iterator[Segment | NamedObject]:
        """Yield the entries that this commit adds, including those in lists; raise RuntimeError if a list was not read.

        Only one list's objects are in memory at a time. The objects of a LostList are omitted.
        """
        yield from self.named
        for object_list in self.object_lists:
            yield from parts_of_entries(listed_objects(object_list))

    @property
    def object_sizes(self) -> dict[str, int]:
        """The size in bytes of every entry in `named_and_listed`, keyed by the entry's key; raises the same error."""
        return {entry.key: entry.size for entry in self.named_and_listed}


class FullSnapshot(CommonPart, frozen=True, kw_only=True, tag=FULL_FORMAT):
    """The commit of a full snapshot; StoredFull describes its fields."""

    fleet_id: str = field(name="fleet")
    global_id_form: str = field(name="global_id")
    baseline: tuple[NodeIdentity, ...]
    groups: dict[str, tuple[Group, ...]]
    base: dict[str, Lsn]
    copied: tuple[StoredObject, ...] = field(name="objects")
    roles: dict[str, tuple[str, ...]]
    rules: GroupRules
    tables: dict[str, tuple[TableState, ...]]
    fingerprints: dict[str, str]
    only_cut: bool = False
    lists: tuple[ObjectList, ...] = ()
    slots_complete_at: dict[str, Lsn] = field(default_factory=dict)
    shared_bases: dict[str, SharedBase] = field(default_factory=dict)
    ran_seconds: Seconds | None = None

    def for_storing(self) -> StoredFull:
        """Return the form in which the commit is stored: if it has many groups, without repetitions."""
        fields: dict[str, Any] = {name: getattr(self, name) for name in FullSnapshot.__struct_fields__}
        if sum(map(len, self.groups.values())) >= SHARED_FROM:
            owners: dict[tuple[Group, ...], str] = {}
            owner_of = {shard: owners.setdefault(groups, shard) for shard, groups in sorted(self.groups.items())}
            lists: dict[tuple[Column, ...], int] = {}
            fields["groups"] = {
                shard: tuple(_with_number(group, lists) for group in self.groups[shard])
                for shard, owner in owner_of.items()
                if owner == shard
            }
            fields["same_groups"] = {shard: owner for shard, owner in owner_of.items() if owner != shard}
            fields["column_lists"] = tuple(lists)
        return StoredFull(**fields)

    @property
    def parts(self) -> dict[str, str | None]:
        """The primary of each standby, by node; None for a primary."""
        return {identity.node: identity.backup_of for identity in self.baseline}

    @property
    def primaries(self) -> tuple[str, ...]:
        """The nodes that are primaries, one for every shard."""
        return tuple(identity.node for identity in self.baseline if identity.backup_of is None)

    @property
    def own_objects(self) -> tuple[StoredObject, ...]:
        """The objects that this document lists itself, including those for tables that DDL changed before the cut."""
        return (*self.copied, *super().own_objects)

    @property
    def object_lists(self) -> tuple[ObjectList, ...]:
        """The lists of additional objects, including those for tables that DDL changed before the cut."""
        return (*self.lists, *super().object_lists)


class StoredGroup(Record, frozen=True):
    """A group in a stored commit; its `columns` may be given by their number in `column_lists`, counted from 0."""

    number: Count
    schema: str
    table: str
    identity: str
    key_width: Count
    columns: tuple[Column, ...] | Count
    partitions: Count = 1


class StoredFull(FullSnapshot, frozen=True, kw_only=True, tag=FULL_FORMAT):
    """The commit of a full snapshot as it is stored.

    Groups, roles, tables and fingerprints are keyed by shard; `base` positions are keyed by node. `rules` selected the
    groups. `fingerprints` identify the state of the catalogs when the DDL was dumped. `only_cut` marks a restore point,
    which has a cut but no tables. `lists` names additional base copy objects. `slots_complete_at` has the position of
    each primary at a moment when all slots had been created: a transaction that was prepared later is in the archives
    of all shards on which it has parts. `shared_bases` has, by primary, the base copies that were read on a standby;
    their objects are listed for the primary. If the snapshot was interrupted and resumed, `seconds` includes the time
    in between, and `ran_seconds` is how long its commands ran.

    If there are many groups, `groups` contains equal groups of several shards only once, and `same_groups` names, for
    each of the other shards, the shard whose groups it has. `column_lists` then has the lists of columns, each of them
    once: with a schema for each tenant, thousands of tables have the same few lists.
    """

    groups: dict[str, tuple[StoredGroup, ...]]  # type: ignore[assignment]  # FullInParts.joined returns the type in use
    same_groups: dict[str, str] = field(default_factory=dict)
    column_lists: tuple[tuple[Column, ...], ...] = ()

    def for_storing(self) -> Self:
        """Return this form itself."""
        return self


def _with_number(group: Group, lists: dict[tuple[Column, ...], int]) -> StoredGroup:
    number = lists.setdefault(group.columns, len(lists))
    return StoredGroup(
        group.number, group.schema, group.table, group.identity, group.key_width, number, group.partitions
    )


class GroupInParts(StoredGroup, frozen=True):
    """A group whose columns are not decoded yet."""

    columns: msgspec.Raw  # type: ignore[assignment]


class FullInParts(StoredFull, frozen=True, kw_only=True, tag=FULL_FORMAT):
    """A full snapshot's commit as it is read: columns are decoded once for all groups that have the same columns.

    Decoding those of each group would take most of the time and memory for reading a commit with many groups.
    """

    groups: dict[str, tuple[GroupInParts, ...]]  # type: ignore[assignment]

    def joined(self) -> FullSnapshot:
        """Return the commit in use; groups with the same columns share them, and so do shards with the same groups.

        Raises msgspec.ValidationError and ValueError.
        """
        if wrong := {*self.same_groups} & {*self.groups} or {*self.same_groups.values()} - {*self.groups}:
            raise ValueError(f"groups and same_groups contradict each other for {', '.join(sorted(wrong))}")
        columns = self._columns()

        def group_of(part: GroupInParts) -> Group:
            found = columns[bytes(part.columns)]
            return Group(part.number, part.schema, part.table, part.identity, part.key_width, found, part.partitions)

        groups = {shard: tuple(map(group_of, parts)) for shard, parts in self.groups.items()}
        if self.same_groups:
            groups |= {shard: groups[owner] for shard, owner in self.same_groups.items()}
            groups = dict(sorted(groups.items()))
        fields = {name: getattr(self, name) for name in FullSnapshot.__struct_fields__}
        return FullSnapshot(**fields | {"groups": groups})

    def is_canonical(self) -> bool:
        """Whether the parts that are not decoded are as `to_json` writes them."""
        return all(text.isdigit() or to_json(columns) == text for text, columns in self._columns().items())

    def _columns(self) -> dict[bytes, tuple[Column, ...]]:
        texts = {bytes(part.columns) for parts in self.groups.values() for part in parts}
        return {text: self._decode(text) for text in texts}

    def _decode(self, text: bytes) -> tuple[Column, ...]:
        if not text.isdigit():
            decoded: tuple[Column, ...] = from_json(text, tuple[Column, ...])
            return decoded
        if (number := from_json(text, Count)) >= len(self.column_lists):
            raise ValueError(f"column_lists has no list {number}")
        return self.column_lists[number]


class Increment(CommonPart, frozen=True, kw_only=True, tag=INCREMENT_FORMAT):
    """The commit of an increment. `history` is None in commits that early versions wrote.

    `renewed` holds, by node, the copies that begin again with this increment. Their objects are among those of
    `definition_changes`, which is then not None. `slots_complete_at` is set if primaries are among them, and means the
    same as in a full snapshot. `retired` holds the shards that the chain contains only up to the previous commit;
    `definition_changes` is not None then, either.
    """

    history: ChainHistory | None = None
    renewed: dict[str, Renewal] = field(default_factory=dict)
    slots_complete_at: dict[str, Lsn] = field(default_factory=dict)
    retired: tuple[str, ...] = ()


class Void(Record, frozen=True, tag_field="schema", tag=VOID_FORMAT):
    """A document in place of a commit, which prevents operation `voids` from committing."""

    snapshot: str
    increment: Count
    voids: str


Commit: TypeAlias = FullSnapshot | Increment


# PostgreSQL's text can't contain NUL.
Text = Annotated[str, msgspec.Meta(pattern=r"^[^\0]*\Z")]
RoleName = Annotated[str, msgspec.Meta(min_length=1, pattern=r"^[^\0]+\Z")]


class Grant(Record, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A privilege on a large object, stored as an array; the grantee "" is PUBLIC."""

    grantor: RoleName
    grantee: Text
    privilege: Literal["SELECT", "UPDATE"]
    may_grant: bool


NO_ROLE = re.compile(r"unknown \(OID=[0-9]+\)")


class LargeObjectDefinition(Record, frozen=True):
    """The owner, comment and grants of a large object. `grants` is None for the default privileges."""

    owner: RoleName
    comment: Text | None
    grants: tuple[Grant, ...] | None


def is_no_role(name: str) -> bool:
    """Whether this is the name that PostgreSQL shows for a role that does not exist (pg_get_userbyid)."""
    return NO_ROLE.fullmatch(name) is not None


def parse_definition(text: str) -> LargeObjectDefinition:
    """Parse a large object's definition; raise ValueError if it is invalid."""
    try:
        definition: LargeObjectDefinition = from_json(text, LargeObjectDefinition)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise ValueError(f"a definition is invalid: {shortened(str(error))}") from error
    return definition


def list_large_objects(commit: FullSnapshot) -> tuple[StoredObject, ...]:
    """Return the stored objects in a full snapshot that hold large objects."""
    entries = [entry for entry in commit.entries if entry.kind == LARGE_OBJECTS]
    return tuple(stored for entry in entries for stored in listed_objects(entry))


def group_by_copy_task(objects: Iterable[StoredObject]) -> list[tuple[StoredObject, ...]]:
    """Group the objects by copy task, in order: the keys of a task share a prefix and end in numbers."""
    by_prefix: dict[str, list[StoredObject]] = {}
    for stored_object in sorted(objects, key=lambda stored: stored.key):
        by_prefix.setdefault(stored_object.key.rsplit("-", 2)[0], []).append(stored_object)
    return [tuple(together) for together in by_prefix.values()]


def count_by_node(commit: FullSnapshot) -> dict[str, int]:
    """Count each node's large objects in a full snapshot; nodes without large objects are omitted."""
    counts: dict[str, int] = {}
    for entry in commit.entries:
        if entry.kind != LARGE_OBJECTS:
            continue
        counts[entry.node] = counts.get(entry.node, 0) + entry.rows.get(LARGE_OBJECTS_COUNT, 0)
    return {node: count for node, count in counts.items() if count}


def with_large_object_counts(
    left_out: Iterable[LeftOut], full: FullSnapshot, shards: Collection[str]
) -> tuple[LeftOut, ...]:
    """Add the large objects in a chain that begins with `full` to `left_out`: later changes to them are not covered.

    Only those of `shards`, which the chain still has, are added.
    """
    counts = {node: count for node, count in count_by_node(full).items() if node in shards}
    return mark_large_objects(left_out, {node: (count, str(full.base[node])) for node, count in counts.items()})
