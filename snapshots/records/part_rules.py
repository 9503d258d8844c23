"""The rules for the parts of a commit: nodes, cut, segments, objects, counts. What can be told twice must be the same.

An object's key says of what node and kind it is, a standby has its primary's database, and the counts sum up the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from msgspec import UnsetType

from cutline.fleet.nodes.baseline import NodeIdentity
from cutline.snapshots.records.commit import Commit, CutRecord, FullSnapshot
from cutline.snapshots.records.definition_rules import check_distinct
from cutline.snapshots.records.documents import DOCUMENT_BYTES_MAX
from cutline.snapshots.records.keys import base_prefix, ddl_prefix, list_prefix
from cutline.snapshots.records.stored_object import (
    BASE,
    DDL,
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    WITHOUT_ROWS,
    ObjectList,
    StoredObject,
)
from cutline.storage.store import check_key
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.safe_time import safe_time
from cutline.wal.segments.archive import Segment, archive_prefix, segment_key

# What pg_encoding_to_char prints for a database's encoding (PostgreSQL manual, "Supported Character Sets").
ENCODINGS = frozenset({
    "SQL_ASCII", "EUC_JP", "EUC_CN", "EUC_KR", "EUC_TW", "EUC_JIS_2004", "UTF8", "MULE_INTERNAL", "LATIN1",
    "LATIN2", "LATIN3", "LATIN4", "LATIN5", "LATIN6", "LATIN7", "LATIN8", "LATIN9", "LATIN10", "WIN1256",
    "WIN1258", "WIN866", "WIN874", "KOI8R", "KOI8U", "WIN1250", "WIN1251", "WIN1252", "WIN1253", "WIN1254",
    "WIN1255", "WIN1257", "ISO_8859_5", "ISO_8859_6", "ISO_8859_7", "ISO_8859_8",
})  # fmt: skip
PROVIDERS = frozenset("cib")
LARGE_PART = "part-large-"


def check_baseline(baseline: Iterable[NodeIdentity]) -> None:
    """Raise ValueError unless every node is named once, and a standby has the database of its primary."""
    identities = {identity.node: identity for identity in baseline}
    check_distinct("baseline", "node", [identity.node for identity in baseline])
    for node, one in identities.items():
        if one.encoding not in ENCODINGS or one.locale_provider not in PROVIDERS:
            raise ValueError(f"baseline has an unknown encoding or locale_provider of {node}")
        if one.in_recovery != (one.backup_of is not None):
            raise ValueError(f"baseline: in_recovery and backup_of of {node} don't match")
        primary = identities.get(one.backup_of or node)
        if primary and _database(primary) != _database(one):
            raise ValueError(f"baseline: {node} has another database than {primary.node}")


def _database(one: NodeIdentity) -> tuple[object, ...]:
    """What a physical standby has as its primary has it."""
    return (
        one.system_identifier, one.database_oid, one.database, one.server_version // 10000, one.encoding, one.collate,
        one.ctype, one.locale_provider, one.locale, one.icu_rules,
    )  # fmt: skip


def check_cut(cut: CutRecord) -> None:
    """Raise ValueError unless positions are in the order in which a cut makes them, and none is listed twice."""
    # Early versions did not store causes.
    if cut.causes and len(cut.causes) != cut.attempts - 1:
        raise ValueError(f"cut.attempts is {cut.attempts}, but cut.causes has {len(cut.causes)}")
    if cut.included_early > cut.in_flight:
        raise ValueError("cut.included_early is more than cut.in_flight")
    if cut.safe_at != safe_time(cut.nodes):
        raise ValueError("cut.safe_at is not that of its nodes")
    for one in cut.nodes:
        if one.start > one.finish or one.position < one.start:
            raise ValueError(f"cut of node {one.node}: start, finish and position are not in order")
        check_distinct(f"cut of node {one.node}", "position", [*(each.lsn for each in one.undecided), *one.rolled_back])
        # Early versions did not store `in_doubt`.
        parts = () if isinstance(one.in_doubt, UnsetType) else one.in_doubt
        check_distinct(f"cut of node {one.node}", "position in doubt", [each.lsn for each in parts])


def check_continues(before: Commit, commit: Commit) -> None:
    """Raise ValueError unless the commit's cut and objects come after those of the commit before."""
    earlier: dict[str, NodeCut] = {one.node: one for one in before.cut.nodes}
    for one in commit.cut.nodes:
        if one.position < earlier[one.node].position or one.start < earlier[one.node].start:
            raise ValueError(f"cut of node {one.node} is before that of the commit before")
    if {one.key for one in before.named} & {one.key for one in commit.named}:
        raise ValueError("the commit lists an object of the commit before")


def check_segments(commit: Commit, node: str, segments: Iterable[Segment]) -> None:
    """Raise ValueError unless the segments are of this node's archive, and their counts are possible."""
    prefix = archive_prefix(commit.snapshot, node, commit.chain)
    for one in segments:
        if one.node != node:
            raise ValueError(f"segments.{node} lists a segment of another node")
        if one.key != segment_key(prefix, one.number):
            raise ValueError(f"segments.{node} has key {one.key}, which is not that of its segment {one.number}")
        if one.partials + one.truncates > one.changes or one.after > one.through:
            raise ValueError(f"segments.{node}: the numbers of segment {one.number} don't fit")
        if one.events_at is not None and one.events_at > one.size:
            raise ValueError(
                f"segments.{node}: segment {one.number} has its events at {one.events_at} of {one.size} bytes"
            )


def check_objects(commit: Commit) -> None:
    """Raise ValueError unless every object is listed once, and its key is of its node and kind."""
    check_distinct("objects", "key", [one.key for one in commit.named])
    for stored in commit.own_objects:
        check_object(commit.snapshot, stored)
    for one in commit.object_lists:
        _check_list(commit, one)
    archives = Counter((stored.node, stored.kind) for stored in commit.own_objects if stored.kind in WITHOUT_ROWS)
    by_commit = 2 if isinstance(commit, FullSnapshot) and commit.definition_changes else 1
    for (node, kind), times in archives.items():
        if times > (by_commit if kind == DDL else 1):
            raise ValueError(f"objects has {kind} of {node} twice")


def _check_list(commit: Commit, one: ObjectList) -> None:
    """Raise ValueError unless the key is of its node, kind and operation, and it lists something."""
    if one.kind not in (BASE, LARGE_OBJECTS):
        raise ValueError(f"object list {one.key} is of an unknown kind: {one.kind}")
    if not 0 < one.objects < one.size <= DOCUMENT_BYTES_MAX:
        raise ValueError(f"object list {one.key} has {one.objects} objects and {one.size} bytes")
    if not one.key.startswith(f"{list_prefix(commit.snapshot, one.node, commit.operation)}/{one.kind}-"):
        raise ValueError(f"object list {one.key} is not of kind {one.kind} and node {one.node}, as its key says")


def check_listed(commit: Commit, one: ObjectList, listed: Iterable[StoredObject]) -> None:
    """Raise ValueError unless these are the objects that the list sums up, by its entry in the commit."""
    listed = list(listed)
    check_distinct("objects", "key", [stored.key for stored in listed])
    rows: Counter[int] = Counter()
    for stored in listed:
        check_key(stored.key)
        check_object(commit.snapshot, stored)
        if (stored.node, stored.kind) != (one.node, one.kind):
            raise ValueError(f"object {stored.key} is not of kind {one.kind} and node {one.node}, as its list is")
        if not stored.key.startswith(f"{base_prefix(commit.snapshot, one.node, commit.operation)}/"):
            raise ValueError(f"object {stored.key} is not of operation {commit.operation}, as its list is")
        rows.update(stored.rows)
    if (len(listed), sum(stored.size for stored in listed), dict(rows)) != (one.objects, one.bytes, one.rows):
        raise ValueError("its objects, bytes and rows are not those that its commit counts")


def check_object(snapshot: str, stored: StoredObject) -> None:
    """Raise ValueError unless the object's key and rows are of its node and kind."""
    is_rows = stored.kind in (BASE, LARGE_OBJECTS)
    if not is_rows and stored.kind not in WITHOUT_ROWS:
        raise ValueError(f"object {stored.key} is of an unknown kind: {stored.kind}")
    folder = (base_prefix if is_rows else ddl_prefix)(snapshot, stored.node, "")
    name = stored.key.rpartition("/")[2]
    of_kind = name.startswith(LARGE_PART) == (stored.kind == LARGE_OBJECTS) if is_rows else name.startswith(stored.kind)
    if not stored.key.startswith(folder) or not of_kind:
        raise ValueError(f"object {stored.key} is not of kind {stored.kind} and node {stored.node}, as its key says")
    if not is_rows and stored.rows:
        raise ValueError(f"object {stored.key} is {stored.kind} and has rows")
    if stored.kind == LARGE_OBJECTS and not stored.rows.keys() <= {LARGE_OBJECTS_COUNT}:
        raise ValueError(f"object {stored.key} has rows besides large objects")


def check_counts(full: FullSnapshot, commit: Commit) -> None:
    """Raise ValueError unless the commit's counts are those of what it lists; a count that it lacks is not compared."""
    for name, count in count_listed(set(full.primaries), commit).items():
        if commit.counts.get(name, count) != count:
            raise ValueError(f"counts.{name} is {commit.counts[name]}, but the commit lists {count}")


def count_listed(primaries: set[str], commit: Commit) -> dict[str, int]:
    """Rows, changes and transactions of the primaries, and objects and bytes of all nodes, that the commit lists."""
    segments = [(node, one) for node, listed in commit.segments.items() for one in listed]
    lists = commit.object_lists
    copies = [one for one in commit.entries if one.node in primaries and one.kind == BASE]
    return {
        "rows": sum(sum(one.rows.values()) for one in copies),
        "changes": sum(one.changes for node, one in segments if node in primaries),
        "transactions": sum(one.local_transactions for one in commit.cut.nodes) + commit.cut.global_transactions,
        "objects": len(commit.named) + sum(one.objects for one in lists),
        "bytes": sum(one.size for one in commit.named) + sum(one.bytes for one in lists),
    }
