"""The rules for each commit, and for each chain, that types can't express.

The digest of a commit proves that it is as it was written, and its type proves that every value is valid. These rules
prove that its parts are consistent, so that no command works from an inconsistent commit. An object's key names its
node and kind, a standby has its primary's database, and the counts are the totals of the entries. Commits determine how
rows are read: a succession that is missing, or belongs to a different table, would silently drop or scramble rows.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec import structs

from cutline.fleet.lsn import ORIGIN, Lsn
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.groups import Column, Group
from cutline.nodes.table_state import XML_STAMP, TableState
from cutline.snapshots.records.chain import Chain, first_summarized
from cutline.snapshots.records.commit import (
    BASE,
    DDL,
    LARGE_OBJECTS,
    LARGE_OBJECTS_COUNT,
    WITHOUT_ROWS,
    ChainHistory,
    Commit,
    CutRecord,
    DeadRows,
    DefinitionChanges,
    FullSnapshot,
    Increment,
    LostWal,
    NamedObject,
    ObjectList,
    Renewal,
    StoredObject,
)
from cutline.snapshots.records.documents import (
    DOCUMENT_BYTES_MAX,
    base_prefix,
    checking,
    ddl_prefix,
    list_prefix,
)
from cutline.snapshots.records.merge_records import Merge
from cutline.storage.store import check_key
from cutline.wal.cut.cut_values import NodeCut
from cutline.wal.cut.safe_time import safe_time_of_nodes
from cutline.wal.segments.archive import Segment, archive_prefix, has_place_of, segment_key

PARTITIONS_MAX = 1024
# The identities of groups with a key, and of groups without a key.
KEYED, KEYLESS = frozenset({"default", "index"}), frozenset({"full", "append_only"})
# A single value as `copy_text` writes it, without column or line delimiters.
COPY_TEXT = re.compile(r"(?:[^\\\x08\t\n\v\f\r]|\\[bfnrtv\\]|\\x[89a-f][0-9a-f])*+")
XML_NUMBER = re.compile(rf"{XML_STAMP}[0-9]{{1,4}}")
NAMED_MAX = 5


def check_groups(where: str, groups: Iterable[Group]) -> None:
    """Raise ValueError unless every definition is valid and no two definitions have the same number."""
    groups = list(groups)
    check_distinct(where, "number", [group.number for group in groups])
    checked = set[int]()
    for group in groups:
        _check_group(f"{where}, group {group.number}", group)
        # Thousands of groups share their columns (commit.FullInParts).
        if id(group.columns) not in checked:
            _check_columns(f"{where}, group {group.number}", group.columns)
            checked.add(id(group.columns))


def _check_group(where: str, group: Group) -> None:
    columns = group.columns
    if not group.number or group.number >= 1 << 31:
        raise ValueError(f"{where}: its number is out of range")
    if group.identity not in (KEYED if group.key_width else KEYLESS) or group.key_width > len(columns):
        raise ValueError(f"{where}: identity and key_width don't match")
    if not 1 <= group.partitions <= PARTITIONS_MAX or group.partitions & (group.partitions - 1):
        raise ValueError(f"{where}: partitions is not a power of two up to {PARTITIONS_MAX}")


def _check_columns(where: str, columns: tuple[Column, ...]) -> None:
    check_distinct(where, "column name", [column.name for column in columns])
    if sorted(column.position for column in columns) != list(range(len(columns))):
        raise ValueError(f"{where}: the positions of its columns are not 0 to {len(columns) - 1}")
    if any(column.number for column in columns):
        check_distinct(where, "column number", [column.number for column in columns])
        if not all(column.number for column in columns):
            raise ValueError(f"{where}: a column has no number")
        ordered = [column.number for column in sorted(columns, key=lambda column: column.position)]
        if ordered != sorted(ordered):
            raise ValueError(f"{where}: the numbers of its columns are not in the order of their positions")
    for column in columns:
        if column.missing is not None and not COPY_TEXT.fullmatch(column.missing):
            raise ValueError(f"{where}: the missing value of column {column.name} is not in COPY's text format")


def check_same_kind(groups: Mapping[str, Iterable[Group]], *, named: bool) -> None:
    """Raise ValueError if only some of the tables with a number have a key or, with `named`, if their names differ.

    Rows of all shards are folded together by number.
    """
    found: dict[int, Group] = {}
    for some in groups.values():
        for group in some:
            other = found.setdefault(group.number, group)
            if other is group:
                continue
            if group.is_multiset != other.is_multiset or (named and group.name != other.name):
                raise ValueError(f"groups uses number {group.number} for different tables")


def check_states(where: str, states: Iterable[TableState]) -> None:
    """Raise ValueError unless the states belong to different tables and their stamps can be read."""
    states = list(states)
    check_distinct(where, "table", [state.table for state in states])
    for state in states:
        if any(kind.startswith(XML_STAMP) and not XML_NUMBER.fullmatch(kind) for kind in state.types):
            raise ValueError(f"{where}: types of {state.table} contains a column without a number")


def check_definitions(
    before: Chain, changes: DefinitionChanges, parts: Mapping[str, str | None], absent: Collection[str] = ()
) -> None:
    """Raise ValueError unless every number identifies one definition, and every definition continues its own table.

    `parts` are the nodes after the changes (Chain.parts). The commit leaves out the copies of the `absent` nodes.
    """
    for shard in {backup_of or node: None for node, backup_of in parts.items()}:
        if not any(shard in one for one in (changes.groups, changes.gone, changes.successions)) and not changes.begun:
            continue
        is_new = shard not in before.parts
        known = {} if is_new else before.definitions(shard)
        new = {group.number: group for group in changes.groups.get(shard, ())}
        successions, gone = changes.successions.get(shard, {}), changes.gone.get(shard, ())
        check_groups(f"schema_changes.groups.{shard}", changes.groups.get(shard, ()))
        if new.keys() & known.keys():
            raise ValueError(f"schema_changes.groups.{shard} uses a number twice")
        if not successions.keys() <= new.keys() or not set(successions.values()) <= known.keys():
            raise ValueError(f"schema_changes.successions.{shard} contains a number without a definition")
        current = set[int]() if is_new else {group.number for group in before.groups(shard)}
        check_distinct(f"schema_changes.gone.{shard}", "number", gone)
        if not set(gone) <= current:
            raise ValueError(f"schema_changes.gone.{shard} contains a number without a definition")
        check_distinct(f"schema_changes.successions.{shard}", "number", list(successions.values()))
        if not set(successions.values()) <= set(gone):
            raise ValueError(f"schema_changes.successions.{shard} continues a table that is not in schema_changes.gone")
        for number, old in successions.items():
            _check_continued(f"schema_changes.successions.{shard}.{number}", known[old], new[number])
        for node, backup_of in parts.items():
            begun = set[int]() if node in absent else new.keys()
            if (backup_of or node) == shard and changes.begun.get(node, {}).keys() != begun:
                raise ValueError(f"schema_changes.begun.{node} does not match the new definitions")


def check_copied(parts: Mapping[str, str | None], commit: Commit) -> None:
    """Raise ValueError unless every new definition continues another, or was copied before the cut with all its rows.

    `parts` are the nodes of the commit (Chain.parts). The position from which its changes count is that of the copy or,
    if it continues another, that of a change.
    """
    if (changes := commit.definition_changes) is None:
        return
    copied = {node: Counter[int]() for node in parts}
    entries: tuple[NamedObject, ...] = (*changes.objects, *changes.lists)
    for entry in entries:
        if entry.kind == BASE:
            copied[entry.node].update(entry.rows)
    for node, backup_of in parts.items():
        shard = backup_of or node
        cut, continued = commit.cut.of(shard), changes.successions.get(shard, {})
        numbers = {group.number for group in changes.groups.get(shard, ())} - continued.keys()
        if node in commit.absent:
            numbers = set()
        if changes.copied.get(node, {}) != {number: copied[node][number] for number in numbers}:
            raise ValueError(f"schema_changes.copied.{node} does not match the base copies of the new definitions")
        if (reader := changes.readers.get(node)) is not None:
            _check_reader(node, reader, parts, commit, numbers)
        if node in changes.pending:
            copied_at = [changes.begun.get(node, {}).get(number, ORIGIN) for number in numbers]
            _check_pending(f"schema_changes.pending.{node}", changes.pending[node], max(copied_at, default=ORIGIN))
        for number, position in changes.begun.get(node, {}).items():
            if position > max(cut.position, cut.finish):
                raise ValueError(f"schema_changes.begun.{node}.{number} is after the cut")


def _check_pending(where: str, pending: tuple[Lsn, ...], position: Lsn) -> None:
    """Raise ValueError unless these are positions of transactions that a copy at `position` may lack."""
    if list(pending) != sorted({*pending}) or any(lsn >= position for lsn in pending):
        raise ValueError(f"{where} is not ascending, or not before {position}")


def _check_reader(
    primary: str, reader: str, parts: Mapping[str, str | None], commit: Commit, numbers: Iterable[int]
) -> None:
    """Raise ValueError unless both copies of the tables with these `numbers` can come from the `reader`'s snapshot."""
    changes, where = commit.definition_changes or DefinitionChanges(), f"schema_changes.readers.{primary}"
    if parts.get(reader) != primary or reader in commit.absent:
        raise ValueError(f"{where}: {reader} is not a standby of {primary} that takes part")
    found = [(changes.begun.get(node, {}), changes.copied.get(node, {})) for node in (primary, reader)]
    for number in numbers:
        places = [(begun.get(number), copied.get(number)) for begun, copied in found]
        if places[0] != places[1]:
            raise ValueError(f"{where}: the copies of {primary} and {reader} differ in table {number}")


def _check_continued(where: str, old: Group, new: Group) -> None:
    """Raise ValueError unless rows of `old` can be converted to `new`."""
    if old.is_multiset != new.is_multiset or old.partitions != new.partitions:
        raise ValueError(f"{where}: rows of group {old.number} can't become rows of group {new.number}")
    keys = [[column.number for column in group.columns[: group.key_width]] for group in (old, new)]
    if keys[0] != keys[1]:
        raise ValueError(f"{where}: group {old.number} has a different key than group {new.number}")
    was, now = ({column.number for column in group.columns} for group in (old, new))
    # Attribute numbers only grow. A table that had columns both dropped and added is copied again (table_changes.py).
    if 0 not in was | now and ((was - now and now - was) or any(number < max(was) for number in now - was if was)):
        raise ValueError(f"{where}: the columns of group {new.number} can't continue those of group {old.number}")


def check_tables(before: Chain | None, chain: Chain) -> None:
    """Raise ValueError unless, at the chain's last commit, every shard has each table once and with a state."""
    for shard in chain.primaries:
        groups = chain.groups(shard)
        check_distinct(f"groups.{shard}", "table", [group.name for group in groups])
        known = before if before is not None and shard in before.parts else None
        had_all = known is None or len(known.tables(shard)) == len(known.groups(shard))
        states = chain.tables(shard)
        # Early full snapshots have no states.
        is_stated = bool(chain.full.tables.get(shard)) or shard not in chain.full.groups
        if is_stated and had_all and len(states) < len(groups):
            lacking = sorted({group.name for group in groups} - states.keys())
            raise ValueError(f"tables.{shard} contains no state for {', '.join(lacking[:NAMED_MAX])}")
        if known is not None and (changes := chain.last.definition_changes):
            _check_same_tables(known, states, changes, shard)


def _check_same_tables(before: Chain, states: Mapping[str, TableState], changes: DefinitionChanges, shard: str) -> None:
    """Raise ValueError if a definition continues the definition of a table with a different oid."""
    old, states_before = before.definitions(shard), before.tables(shard)
    new = {group.number: group for group in changes.groups.get(shard, ())}
    if unknown := {state.table for state in changes.tables.get(shard, ())} - states.keys():
        raise ValueError(f"schema_changes.tables.{shard} contains {sorted(unknown)[0]}, which is not a group")
    for number, one in changes.successions.get(shard, {}).items():
        was, now = states_before.get(old[one].name), states.get(new[number].name)
        if was and now and was.oid != now.oid:
            raise ValueError(f"schema_changes.successions.{shard}.{number} continues a different table")


def definition_counts(chain: Chain) -> dict[str, int]:
    """Count the tables at the chain's last commit, and those that it continues, so that no table can get lost."""
    changes = chain.last.definition_changes
    continued = sum(map(len, changes.successions.values())) if changes else 0
    return {"groups": sum(map(chain.count_groups, chain.primaries)), "continued": continued}


def _check_definition_counts(commit: Commit, counts: Mapping[str, int]) -> None:
    """Raise ValueError unless the commit's counts of definitions are these."""
    for name, count in counts.items():
        if commit.counts.get(name, count) != count:
            raise ValueError(f"counts.{name} is {commit.counts[name]}, but the commit contains {count}")


def check_distinct(where: str, what: str, values: Iterable[Any]) -> None:
    """Raise ValueError if a value occurs twice."""
    for value, times in Counter(values).items():
        if times > 1:
            raise ValueError(f"{where} contains {what} {str(value)[:100]!r} twice")


# The names that pg_encoding_to_char returns for a database's encoding (PostgreSQL manual, "Supported Character Sets").
ENCODINGS = frozenset(
    {
        "SQL_ASCII",
        "EUC_JP",
        "EUC_CN",
        "EUC_KR",
        "EUC_TW",
        "EUC_JIS_2004",
        "UTF8",
        "MULE_INTERNAL",
        "LATIN1",
        "LATIN2",
        "LATIN3",
        "LATIN4",
        "LATIN5",
        "LATIN6",
        "LATIN7",
        "LATIN8",
        "LATIN9",
        "LATIN10",
        "WIN1256",
        "WIN1258",
        "WIN866",
        "WIN874",
        "KOI8R",
        "KOI8U",
        "WIN1250",
        "WIN1251",
        "WIN1252",
        "WIN1253",
        "WIN1254",
        "WIN1255",
        "WIN1257",
        "ISO_8859_5",
        "ISO_8859_6",
        "ISO_8859_7",
        "ISO_8859_8",
    }
)
PROVIDERS = frozenset("cib")
LARGE_PART, DEAD_PART = "part-large-", "dead-"


def check_baseline(baseline: Iterable[NodeIdentity], *, of_one_time: bool = True) -> None:
    """Raise ValueError unless every node is named once and every standby has its primary's database.

    Unless the identities are `of_one_time`, a database may have been renamed in between.
    """
    identities = {identity.node: identity for identity in baseline}
    check_distinct("baseline", "node", [identity.node for identity in baseline])
    for node, one in identities.items():
        if one.encoding not in ENCODINGS or one.locale_provider not in PROVIDERS:
            raise ValueError(f"baseline: the encoding or locale_provider of {node} is unknown")
        if one.in_recovery != (one.backup_of is not None):
            raise ValueError(f"baseline: in_recovery and backup_of don't match for {node}")
        primary = identities.get(one.backup_of or node)
        is_named = primary is None or not of_one_time or primary.database == one.database
        if primary and not (is_named and _database(primary) == _database(one)):
            raise ValueError(f"baseline: {node} has a different database than {primary.node}")


def _database(identity: NodeIdentity) -> tuple[object, ...]:
    """Return the properties, besides the name, that a physical standby shares with its primary."""
    return (
        identity.system_identifier,
        identity.database_oid,
        identity.server_version // 10000,
        identity.encoding,
        identity.collate,
        identity.ctype,
        identity.locale_provider,
        identity.locale,
        identity.icu_rules,
    )


def check_cut(cut: CutRecord) -> None:
    """Raise ValueError unless the cut's counts agree, its positions are in order, and none is listed twice."""
    if len(cut.causes) != cut.attempts - 1:
        raise ValueError(f"cut.attempts is {cut.attempts}, but cut.causes lists {len(cut.causes)}")
    if cut.included_early > cut.in_flight:
        raise ValueError("cut.included_early is greater than cut.in_flight")
    if cut.safe_at != safe_time_of_nodes(cut.nodes):
        raise ValueError("cut.safe_at does not match its nodes")
    for node in cut.nodes:
        if node.start > node.finish or node.position < node.start:
            raise ValueError(f"cut of node {node.node}: start, finish and position are not in order")
        check_distinct(
            f"cut of node {node.node}", "position", [*(each.lsn for each in node.undecided), *node.rolled_back]
        )
        check_distinct(f"cut of node {node.node}", "position in doubt", [each.lsn for each in node.in_doubt])


def _check_lost(before: Commit, increment: Increment, node: str, lost: LostWal) -> None:
    where, renewal = f"renewed.{node}.lost", increment.renewed[node]
    if renewal.is_new or renewal.identity.backup_of is not None:
        raise ValueError(f"{where} is set, but the copy is new, or that of a standby")
    if lost.since is not None and lost.since >= increment.increment:
        raise ValueError(f"{where}.since is not an earlier increment")
    # A partial chain may lack the previous commit.
    is_next = before.increment + 1 == increment.increment
    if is_next and (lost.since is not None) != (before.cut.of(node).position > lost.after):
        raise ValueError(f"{where}.since does not match the cut of the previous commit")


def check_continues(before: Commit, commit: Commit) -> None:
    """Raise ValueError if the commit's cut precedes the previous one, or if both commits list the same object.

    The WAL of a renewed primary may have branched off before the previous cut.
    """
    earlier: dict[str, NodeCut] = {node.node: node for node in before.cut.nodes}
    renewed = commit.renewed if isinstance(commit, Increment) else {}
    for node in commit.cut.nodes:
        if node.node in renewed:
            continue
        if node.position < earlier[node.node].position or node.start < earlier[node.node].start:
            raise ValueError(f"the cut of node {node.node} precedes its cut in the previous commit")
    if {entry.key for entry in before.named} & {entry.key for entry in commit.named}:
        raise ValueError("the commit lists an object that the previous commit also lists")


def check_segments(commit: Commit, node: str, segments: Iterable[Segment]) -> None:
    """Raise ValueError unless the segments belong to this node's archive and their counts are possible."""
    prefix = archive_prefix(commit.snapshot, node, commit.chain)
    for segment in segments:
        if segment.node != node:
            raise ValueError(f"segments.{node} lists a segment of a different node")
        # `_check_archives` compares the operation in the key.
        if not has_place_of(segment.key, segment_key(prefix, segment.number)):
            raise ValueError(f"segments.{node}: {segment.key} is not the key of segment {segment.number}")
        if segment.partials + segment.truncates > segment.changes or segment.after > segment.through:
            raise ValueError(f"segments.{node}: the counts or positions of segment {segment.number} are inconsistent")
        if segment.events_at is not None and segment.events_at > segment.size:
            raise ValueError(
                f"segments.{node}: the events of segment {segment.number} start at byte {segment.events_at},"
                f" but the segment is only {segment.size} bytes long"
            )


def _check_idle(commit: Commit) -> None:
    """Raise ValueError if this commit lists segments of idle nodes, or no earlier commit lists their last segments."""
    if commit.idle and isinstance(commit, FullSnapshot):
        raise ValueError("idle is set in a full snapshot")
    for node, last in commit.idle.items():
        if commit.segments.get(node) != ():
            raise ValueError(f"idle.{node}: the commit lists segments of this node, or does not list the node")
        check_segments(commit, node, [last])
        if last.operation == commit.operation or last.open is not None:
            raise ValueError(f"idle.{node}: segment {last.number} is not the end of the archive at an earlier commit")


def _check_absent(commit: Commit) -> None:
    """Raise ValueError if the commit lists segments of absent nodes, or no earlier commit lists their last segments."""
    if (commit.absent or commit.timelines or commit.renamed) and isinstance(commit, FullSnapshot):
        raise ValueError("absent, timelines or renamed is set in a full snapshot")
    for node, copy in commit.absent.items():
        if commit.segments.get(node) != () or node in commit.idle:
            raise ValueError(f"absent.{node}: the commit lists segments of this node, or does not list the node")
        if not 0 < copy.since <= commit.increment or not copy.reason:
            raise ValueError(f"absent.{node}: since or reason is not possible")
        check_segments(commit, node, [copy.last])
        if copy.last.operation == commit.operation or copy.last.open is not None:
            raise ValueError(
                f"absent.{node}: segment {copy.last.number} is not the end of the archive at an earlier commit"
            )


def check_objects(commit: Commit, *, allows_any_operation: bool = False) -> None:
    """Raise ValueError unless every object is listed once, under a key for its node and kind.

    Unless it `allows_any_operation`, as the beginning of a merged chain does, its lists must be those of the commit's.
    """
    check_distinct("objects", "key", [entry.key for entry in commit.named])
    for stored in commit.own_objects:
        check_object(commit.snapshot, stored)
    for object_list in commit.object_lists:
        _check_list(commit, object_list, allows_any_operation=allows_any_operation)
    archives = Counter((stored.node, stored.kind) for stored in commit.own_objects if stored.kind in WITHOUT_ROWS)
    by_commit = 2 if isinstance(commit, FullSnapshot) and commit.definition_changes else 1
    for (node, kind), times in archives.items():
        if times > (by_commit if kind == DDL else 1):
            raise ValueError(f"objects lists {kind} of {node} twice")


def _check_list(commit: Commit, entry: ObjectList, *, allows_any_operation: bool) -> None:
    """Raise ValueError unless the list is not empty and its key matches its node, kind and operation."""
    if entry.kind not in (BASE, LARGE_OBJECTS):
        raise ValueError(f"object list {entry.key} has an unknown kind: {entry.kind}")
    if not (0 < entry.objects < entry.size <= DOCUMENT_BYTES_MAX and entry.dead <= entry.objects):
        raise ValueError(
            f"object list {entry.key}: its counts are not possible: {entry.objects} objects, {entry.size} bytes"
        )
    operations = ("",) if allows_any_operation else operations_of(commit, entry.node)
    folders = [list_prefix(commit.snapshot, entry.node, operation) for operation in operations]
    is_of_kind = entry.key.rpartition("/")[2].startswith(f"{entry.kind}-")
    if not is_of_kind or not any(
        entry.key.startswith(folder if allows_any_operation else f"{folder}/") for folder in folders
    ):
        raise ValueError(f"object list {entry.key}: its key does not match kind {entry.kind} and node {entry.node}")


def operations_of(commit: Commit | Merge, node: str) -> tuple[str, ...]:
    """Return the operations that may have stored the rows of a node that the commit lists."""
    renewal = commit.renewed.get(node) if isinstance(commit, Increment) else None
    return (commit.operation, renewal.began_by) if renewal and renewal.began_by else (commit.operation,)


def check_listed(
    commit: Commit | Merge, entry: ObjectList, listed: Iterable[StoredObject], *, allows_any_operation: bool
) -> None:
    """Raise ValueError unless the objects match the list's entry in the commit.

    The lists of a merge, which `allows_any_operation`, may contain objects of earlier base copies.
    """
    listed = list(listed)
    check_distinct("objects", "key", [key for stored in listed for key in stored.keys])
    rows: Counter[int] = Counter()
    for stored in listed:
        check_key(stored.key)
        check_object(commit.snapshot, stored)
        if (stored.node, stored.kind) != (entry.node, entry.kind):
            raise ValueError(f"object {stored.key} does not match its list's kind {entry.kind} and node {entry.node}")
        is_own = any(
            stored.key.startswith(f"{base_prefix(commit.snapshot, entry.node, operation)}/")
            for operation in operations_of(commit, entry.node)
        )
        if not is_own and not allows_any_operation:
            raise ValueError(f"object {stored.key} does not belong to operation {commit.operation}, but its list does")
        rows.update(stored.rows)
    dead, size = sum(stored.dead is not None for stored in listed), sum(stored.stored_bytes for stored in listed)
    if (len(listed), dead, size, dict(rows)) != (entry.objects, entry.dead, entry.bytes, entry.rows):
        raise ValueError("its objects, bytes and rows do not match the counts in its commit")


def check_object(snapshot: str, stored: StoredObject) -> None:
    """Raise ValueError unless the object's key and rows match its node and kind."""
    is_rows = stored.kind in (BASE, LARGE_OBJECTS)
    if not is_rows and stored.kind not in WITHOUT_ROWS:
        raise ValueError(f"object {stored.key} has an unknown kind: {stored.kind}")
    folder = (base_prefix if is_rows else ddl_prefix)(snapshot, stored.node, "")
    name = stored.key.rpartition("/")[2]
    of_kind = name.startswith(LARGE_PART) == (stored.kind == LARGE_OBJECTS) if is_rows else name.startswith(stored.kind)
    of_kind = of_kind and not name.startswith(DEAD_PART)
    if not stored.key.startswith(folder) or not of_kind:
        raise ValueError(f"object {stored.key}: its key does not match kind {stored.kind} and node {stored.node}")
    if not is_rows and stored.rows:
        raise ValueError(f"object {stored.key} of kind {stored.kind} contains rows")
    if stored.kind == LARGE_OBJECTS and not stored.rows.keys() <= {LARGE_OBJECTS_COUNT}:
        raise ValueError(f"object {stored.key} contains rows other than large objects")
    if stored.dead is not None:
        _check_dead(stored, stored.dead, folder)


def _check_dead(stored: StoredObject, dead: DeadRows, folder: str) -> None:
    is_named = check_key(dead.key).startswith(folder) and dead.key.rpartition("/")[2].startswith(DEAD_PART)
    if stored.kind != BASE or not is_named:
        raise ValueError(f"object {stored.key}: {dead.key} can't list its dead rows")
    if not dead.rows:
        raise ValueError(f"object {stored.key}: {dead.key} lists no dead rows")


def check_counts(chain: Chain, commit: Commit) -> None:
    """Raise ValueError unless the commit's counts match its entries; missing counts are not compared.

    The chain has the nodes of the commit.
    """
    for name, count in count_listed(set(chain.primaries), commit).items():
        if commit.counts.get(name, count) != count:
            raise ValueError(f"counts.{name} is {commit.counts[name]}, but the commit lists {count}")


def count_listed(primaries: set[str], commit: Commit) -> dict[str, int]:
    """Count the commit's rows, changes and transactions on primaries, and its objects and bytes on all nodes."""
    segments = [(node, segment) for node, listed in commit.segments.items() for segment in listed]
    lists = commit.object_lists
    copies = [entry for entry in commit.entries if entry.node in primaries and entry.kind == BASE]
    return {
        "rows": sum(sum(copy.rows.values()) for copy in copies),
        "changes": sum(one.changes for node, one in segments if node in primaries),
        "transactions": sum(cut.local_transactions for cut in commit.cut.nodes) + commit.cut.global_transactions,
        "objects": len(commit.named) + sum(object_list.parts for object_list in lists),
        "bytes": sum(entry.size for entry in commit.named) + sum(object_list.bytes for object_list in lists),
    }


COUNTS_SHOWN = ("bytes", "changes", "transactions")


def check_commit(commit: Commit) -> None:
    """Raise ValueError unless the commit's parts are consistent."""
    if isinstance(commit, FullSnapshot) != (commit.increment == 0):
        raise ValueError(f"increment number {commit.increment} does not match the kind of commit")
    for name in COUNTS_SHOWN:
        if name not in commit.counts:
            raise ValueError(f"counts lacks {name}")
    for one in commit.named:
        check_key(one.key)
    check_distinct("cut", "node", [cut.node for cut in commit.cut.nodes])
    check_cut(commit.cut)
    for node, segments in commit.segments.items():
        check_segments(commit, node, segments)
    _check_idle(commit)
    _check_absent(commit)
    _check_copying(commit)
    check_objects(commit)
    if isinstance(commit, FullSnapshot):
        _check_full(commit)
    elif commit.history is not None:
        _check_history(commit, commit.history)


def check_fits(chain: Chain, increment: Increment, key: str, groups: int | None = None) -> None:
    """Raise ManifestError unless the increment has the chain's nodes and continues its definitions.

    `groups` is the number of tables at the chain's last commit, if it is known.
    """
    with checking(key):
        if chain.full.only_cut:
            raise ValueError("it continues a restore point, which has no increments")
        now = chain.followed_by(increment)
        _check_nodes(now, increment)
        _check_renewed(chain, now, increment)
        check_continues(chain.last, increment)
        _check_archives(now, increment)
        _check_still_idle(chain, increment)
        _check_still_absent(chain, increment)
        _check_timelines(chain, increment)
        _check_switches(chain, now, increment)
        _check_ids(chain, now, increment)
        check_counts(now, increment)
        # For a partial chain, read_newest_part compares only the digests.
        if not chain.is_partial and increment.history is not None and increment.history != chain.next_history:
            raise ValueError("history does not match the previous commits")
        if increment.definition_changes:
            check_definitions(chain, increment.definition_changes, now.parts, increment.absent)
            check_copied(now.parts, increment)
            _check_at_commit(chain, now)
        else:
            # The tables are the ones in the previous commit.
            counts = definition_counts(chain)["groups"] if groups is None else groups
            _check_definition_counts(increment, {"groups": counts, "continued": 0})


def _check_still_idle(chain: Chain, increment: Increment) -> None:
    """Raise ValueError unless each idle node's archive ends as it does in the previous commits."""
    for node, last in increment.idle.items():
        if last.through > increment.cut.of(chain.shard_of(node)).start:
            raise ValueError(f"idle.{node}: its archive ends after the start of the cut")
        # The commits agree with each other as they are stored, whatever repairs have replaced since.
        if not chain.is_partial and tuple(map(chain.original, _last_segment(chain, node))) != (last,):
            raise ValueError(f"idle.{node}: segment {last.number} is not the last segment of its archive")


def _check_still_absent(chain: Chain, increment: Increment) -> None:
    """Raise ValueError unless absent copies end as in the previous commits, and copies that have ended stay absent."""
    if others := increment.absent.keys() - {node for node, primary in chain.parts.items() if primary is not None}:
        raise ValueError(f"absent names {_names(others)}, which is no standby of the snapshot")
    changes = increment.definition_changes
    for node, copy in increment.absent.items():
        shard = chain.shard_of(node)
        has_new = changes is not None and (shard in changes.groups or shard in changes.gone)
        if has_new and not copy.has_ended:
            raise ValueError(f"absent.{node}: tables of {shard} have changed, but has_ended is not set")
    if chain.is_partial:
        return
    before = chain.last.absent
    for node, copy in increment.absent.items():
        since = before[node].since if node in before else increment.increment
        if copy.since != since:
            raise ValueError(f"absent.{node}: since is {copy.since}, but the copy was left out first by {since}")
        if tuple(map(chain.original, _last_segment(chain, node))) != (copy.last,):
            raise ValueError(f"absent.{node}: segment {copy.last.number} is not the last segment of its archive")
    ended = {node for node, copy in before.items() if copy.has_ended and chain.shard_of(node) not in increment.retired}
    still_ended = {node for node, copy in increment.absent.items() if copy.has_ended}
    if back := ended - still_ended - increment.renewed.keys():
        raise ValueError(f"the copy of {_names(back)} has ended, but the commit continues it")


def _check_timelines(chain: Chain, increment: Increment) -> None:
    """Raise ValueError if a node's timeline is not after those of the previous commits."""
    left = [one for one in chain.nodes if (one.backup_of or one.node) not in increment.retired]
    first = {identity.node: identity.timeline for identity in left} if increment.timelines else {}
    for node, timeline in increment.timelines.items():
        if node not in first or node in increment.renewed or timeline <= first[node]:
            raise ValueError(f"timelines.{node}: {timeline} is not after the timeline with which its copy began")
    if chain.is_partial:
        return
    nodes = {one.node for one in left}
    for node, timeline in chain.last.timelines.items():
        if node in nodes and node not in increment.renewed and increment.timelines.get(node, 0) < timeline:
            raise ValueError(f"timelines.{node}: the previous commit has timeline {timeline}")


def _check_switches(before: Chain, now: Chain, increment: Increment) -> None:
    """Raise ValueError if a switch is not before the node's timeline, or not that of the previous commit."""
    timelines = {node: one.timeline for node, one in now.baseline.items()} if increment.switches else {}
    for node, switches in increment.switches.items():
        check_history(f"switches.{node}", switches, timelines.get(node, 0))
    if before.is_partial:
        return
    earlier = before.baseline if before.last.switches else {}
    for node, switches in before.last.switches.items():
        if node not in now.parts or node in increment.renewed:
            continue
        kept = {one: end for one, end in increment.switches.get(node, {}).items() if one < earlier[node].timeline}
        if kept != switches:
            raise ValueError(f"switches.{node}: the previous commit has another history")


def check_history(where: str, switches: Mapping[int, Lsn], timeline: int) -> None:
    """Raise ValueError unless these timelines ended one after the other before the timeline began."""
    ends = [end for _, end in sorted(switches.items())]
    if not switches or not 0 < min(switches) <= max(switches) < timeline or ends != sorted(ends):
        raise ValueError(f"{where}: they are not the ends of the timelines before timeline {timeline}")


def _check_ids(before: Chain, now: Chain, increment: Increment) -> None:
    """Raise ValueError if an id in fleet.toml could mean two nodes, or belongs to a node that the chain never had."""
    if not increment.renamed:
        return
    check_distinct("renamed", "id", increment.renamed.values())
    if taken := {*increment.renamed.values()} & {*now.all_nodes}:
        raise ValueError(f"renamed gives the id of another node: {_names(taken)}")
    # A chain that begins with a merge has no copies of shards that were retired before it.
    known = {*now.all_nodes, *before.renamed}
    if others := increment.renamed.keys() - known:
        raise ValueError(f"renamed names {_names(others)}, which is not in the snapshot")


def _check_renewed(before: Chain, now: Chain, increment: Increment) -> None:
    """Raise ValueError unless each renewed node's new copy is whole: its identity, rows, position and first segment.

    A shard may join the chain with the increment, or leave it for good.
    """
    renewed, retired = increment.renewed, {*increment.retired}
    if renewed:
        # A standby that is absent may be a copy of a server before its upgrade.
        check_baseline((one for one in now.nodes if one.node not in increment.absent), of_one_time=False)
    known, parts = before.parts, now.parts
    moved = {node for node in renewed.keys() & known.keys() if known[node] != parts.get(node)}
    if others := moved | ({*filter(None, parts.values())} - {*now.primaries}):
        raise ValueError(f"renewed names {_names(others)} with another role or primary than the snapshot has")
    if retired - {*before.primaries} or not now.primaries or len(retired) < len(increment.retired):
        raise ValueError(f"retired names {_names(retired)}, which are no shards of the snapshot, or all of them")
    if retired and increment.definition_changes is None:
        raise ValueError("retired is set, but schema_changes is not")
    if back := {one for one in renewed if one in before.retired or one in retired}:
        raise ValueError(f"renewed names {_names(back)}, which was retired")
    _check_names(increment, (renewal.identity for renewal in renewed.values()))
    for node, renewal in renewed.items():
        _check_renewal(before, increment, node, renewal)
    primaries = renewed.keys() & {*now.primaries}
    if bool(primaries) != bool(increment.slots_complete_at):
        raise ValueError("slots_complete_at does not match renewed: it is set if primaries are renewed")
    if primaries:
        _check_same("slots_complete_at", increment.slots_complete_at, set(now.primaries))
    for shard, position in increment.slots_complete_at.items():
        begin = now.bases[shard] if shard in primaries else ORIGIN
        if not begin <= position <= increment.cut.of(shard).start:
            raise ValueError(f"slots_complete_at.{shard}: {position} is not between the base position and the cut")


def _check_renewal(before: Chain, increment: Increment, node: str, renewal: Renewal) -> None:
    where, shard, changes = f"renewed.{node}", renewal.identity.backup_of or node, increment.definition_changes
    if renewal.identity.node != node or not renewal.reason or changes is None:
        raise ValueError(f"{where}: its identity or reason is not possible, or schema_changes is not set")
    if node in increment.absent or not increment.segments.get(node):
        raise ValueError(f"{where}: the commit lists no segments of this node")
    if renewal.is_new != (node not in before.parts):
        raise ValueError(f"{where}: is_new does not match the nodes of the previous commits")
    if renewal.lost is not None:
        _check_lost(before.last, increment, node, renewal.lost)
    known = {group.number for group in before.groups(shard)} if shard in before.parts else set()
    ended = {*changes.gone.get(shard, ())} - {*changes.successions.get(shard, {}).values()}
    copied = _copied_by(before, where, shard, renewal)
    if not known - ended <= copied <= known or len(copied) < len(renewal.copied):
        raise ValueError(f"{where}.copied does not match the tables of {shard}")
    rows = Counter[int]()
    entries: tuple[NamedObject, ...] = (*changes.objects, *changes.lists)
    for entry in entries:
        if entry.kind == BASE and entry.node == node:
            rows.update(entry.rows)
    if any(rows[number] != count for number, count in renewal.copied.items()):
        raise ValueError(f"{where}.copied does not match the base copies of the node")
    if not renewal.base <= renewal.complete_at <= increment.cut.of(shard).start:
        raise ValueError(f"{where}.base: {renewal.base} is after the start of the cut")
    begin = renewal.base
    for number, segment in enumerate(increment.segments[node], start=1):
        if (segment.number, segment.after) != (number, begin):
            raise ValueError(f"segments.{node}: segment {segment.number} does not continue from {begin}")
        begin = segment.through


def _copied_by(before: Chain, where: str, shard: str, renewal: Renewal) -> set[int]:
    """Return the tables at the last commit that the new copy has; raise ValueError if its later tables are others.

    Tables that were copied in the background have the numbers of definitions that were in force then.
    """
    if not renewal.began_by:
        if renewal.later:
            raise ValueError(f"{where}.later is set, but began_by is not")
        return set(renewal.copied)
    numbers = [number for later in renewal.later for number in later.numbers]
    if len(set(numbers)) < len(numbers) or not set(numbers) == renewal.copied.keys():
        raise ValueError(f"{where}.later does not match its copied tables")
    for later in renewal.later:
        _check_pending(f"{where}.later.pending", later.pending, later.position)
        if later.position < renewal.base:
            raise ValueError(f"{where}.later: {later.position} is before the base")
    at_cut = before.numbers_at_cut(shard)
    if unknown := set(numbers) - at_cut.keys():
        raise ValueError(f"{where}.copied names tables that {shard} does not have: {_names(map(str, unknown))}")
    return {at_cut[number] for number in numbers}


def _check_copying(commit: Commit) -> None:
    """Raise ValueError if a copy that is being made is that of a node with a copy, or its archive is another's."""
    if commit.copying and not commit.increment:
        raise ValueError("copying is set in a full snapshot")
    renewed = commit.renewed if isinstance(commit, Increment) else {}
    for node, copying in commit.copying.items():
        where, last = f"copying.{node}", copying.last
        if (node in commit.segments and node not in commit.absent) or node in renewed:
            raise ValueError(f"{where}: the commit has a copy of this node")
        if node in commit.absent and not commit.absent[node].has_ended:
            raise ValueError(f"{where}: the copy that the chain has of this node has not ended")
        if copying.identity.node != node or copying.identity.backup_of is None or not copying.reason:
            raise ValueError(f"{where}: its identity or reason is not possible")
        if copying.switches:
            check_history(f"{where}.switches", copying.switches, copying.identity.timeline)
        prefix = archive_prefix(commit.snapshot, node, copying.operation)
        if last.node != node or last.key != segment_key(prefix, last.number) or last.through < copying.base:
            raise ValueError(f"{where}: segment {last.number} is not one of its archive")


def _check_archives(chain: Chain, commit: Commit) -> None:
    """Raise ValueError unless the commit's segments belong to the newest archives of their nodes."""
    for node, segments in commit.segments.items():
        prefix = archive_prefix(commit.snapshot, node, chain.archive(node))
        for segment in segments:
            if segment.key != segment_key(prefix, segment.number):
                raise ValueError(f"segments.{node}: {segment.key} is not the key of segment {segment.number}")


def _last_segment(chain: Chain, node: str) -> tuple[Segment, ...]:
    """Return the last segment of the node's archive, if it has any; the chain's commits have passed check_fits."""
    if listed := chain.last.segments[node][-1:]:
        return listed
    last = chain.last.end_of_archive(node)
    return (last,) if last is not None else chain.segments(node)[-1:]


def _check_history(commit: Increment, history: ChainHistory) -> None:
    """Raise ValueError unless the history covers the previous increments and agrees with `previous`."""
    recent = {summary.increment: summary for summary in history.recent}
    if list(recent) != list(range(first_summarized(commit.increment), commit.increment)):
        raise ValueError("history.recent does not list the previous increments")
    if not all(0 < number < commit.increment for number in history.redefinitions):
        raise ValueError("history.redefinitions contains a number that does not belong to a previous increment")
    if any(recent[number].digest != one for number, one in history.redefinitions.items() if number in recent):
        raise ValueError("history contains two digests for the same increment")
    if commit.previous is None:
        raise ValueError("history is set, but previous is not")
    last = recent.get(commit.increment - 1)
    digest, operation = (last.digest, last.operation) if last else (history.full, commit.previous.operation)
    if (commit.previous.digest, commit.previous.operation) != (digest, operation):
        raise ValueError("history and previous name different commits as the previous one")


def _check_at_commit(before: Chain | None, chain: Chain) -> None:
    check_tables(before, chain)
    _check_definition_counts(chain.last, definition_counts(chain))
    check_same_kind({shard: chain.definitions(shard).values() for shard in chain.primaries}, named=before is None)


def _check_nodes(chain: Chain, commit: Commit) -> None:
    nodes, primaries = set(chain.parts), set(chain.primaries)
    _check_same("cut", [node.node for node in commit.cut.nodes], primaries)
    _check_same("sequences", commit.sequences, primaries)
    _check_same("segments", commit.segments, nodes)
    if commit.definition_changes:
        _check_changes(chain, commit, commit.definition_changes)


def _check_changes(chain: Chain, commit: Commit, changes: DefinitionChanges) -> None:
    primaries, parts = set(chain.primaries), chain.parts
    renewed = commit.renewed if isinstance(commit, Increment) else {}
    by_shard = (
        changes.groups,
        changes.gone,
        changes.successions,
        changes.tables,
        changes.roles,
        changes.fingerprints,
        changes.readers,
    )
    if not set().union(*by_shard) <= primaries or not changes.begun.keys() | changes.pending.keys() <= parts.keys():
        raise ValueError("schema_changes names a node that is not in the snapshot")
    for shard, states in changes.tables.items():
        check_states(f"schema_changes.tables.{shard}", states)
    with_ddl = {stored.node for stored in changes.objects if stored.kind == DDL}
    if not with_ddl == changes.roles.keys() == changes.fingerprints.keys():
        raise ValueError("schema_changes does not list DDL objects, roles and fingerprints for the same shards")
    entries: tuple[NamedObject, ...] = (*changes.objects, *changes.lists)
    for stored in entries:
        if stored.node not in parts:
            raise ValueError(f"object {stored.key} belongs to node {stored.node}, which is not in the snapshot")
        begun = {group.number for group in changes.groups.get(parts[stored.node] or stored.node, ())}
        if (renewal := renewed.get(stored.node)) is not None:
            # What was copied in the background may have rows of tables that are gone by now.
            every = chain.definitions(chain.shard_of(stored.node)) if renewal.began_by else {}
            begun |= {*renewal.copied, *every}
        if not stored.rows.keys() <= begun:
            raise ValueError(f"object {stored.key} contains rows of a group that is not new in this commit")


def _check_full(full: FullSnapshot) -> None:
    check_baseline(full.baseline)
    nodes, primaries = set(full.parts), set(full.primaries)
    if not primaries or not set(full.parts.values()) <= {None, *primaries}:
        raise ValueError(f"baseline lists no primary, or a standby of an unknown primary: {_names(nodes)}")
    if full.only_cut and (full.copied or full.lists or any(full.groups.values()) or full.definition_changes):
        raise ValueError("only_cut is set, but the commit contains tables")
    _check_nodes(Chain(full), full)
    _check_archives(Chain(full), full)
    _check_names(full, full.baseline)
    timelines = {identity.node: identity.timeline for identity in full.baseline}
    for node, switches in full.switches.items():
        check_history(f"switches.{node}", switches, timelines.get(node, 0))
    _check_same("base", full.base, nodes)
    _check_slots_complete(full, primaries)
    _check_shared_bases(full)
    _check_same("groups", full.groups, primaries)
    _check_same("roles", full.roles, primaries)
    if not full.tables.keys() | full.fingerprints.keys() <= primaries:
        raise ValueError("tables or fingerprints name a node that is not a primary")
    for shard, states in full.tables.items():
        check_states(f"tables.{shard}", states)
    # Equal shards have the same groups: check them once.
    for shard, groups in {id(groups): (shard, groups) for shard, groups in full.groups.items()}.values():
        check_groups(f"groups.{shard}", groups)
    check_counts(Chain(full), full)
    first = Chain(structs.replace(full, definition_changes=None))
    check_tables(None, first)
    check_same_kind(full.groups, named=True)
    if full.definition_changes:
        check_definitions(first, full.definition_changes, full.parts)
        check_copied(full.parts, full)
    _check_at_commit(first, Chain(full))
    _check_rows(full)


def _check_names(commit: Commit, identities: Iterable[NodeIdentity]) -> None:
    """Raise ValueError if a database that was copied for the commit has another name in its facts."""
    for identity in identities:
        facts = commit.databases.get(identity.backup_of or identity.node)
        if facts is not None and facts.name not in ("", identity.database):
            raise ValueError(f"databases names {facts.name}, but {identity.node} has database {identity.database}")


def _check_slots_complete(full: FullSnapshot, primaries: set[str]) -> None:
    if not full.slots_complete_at:
        return
    _check_same("slots_complete_at", full.slots_complete_at, primaries)
    for shard, position in full.slots_complete_at.items():
        if not full.base[shard] <= position <= full.cut.of(shard).start:
            raise ValueError(f"slots_complete_at.{shard}: {position} is not between the base position and the cut")


def _check_shared_bases(full: FullSnapshot) -> None:
    if not full.shared_bases:
        return
    entries: tuple[NamedObject, ...] = (*full.copied, *full.lists)
    parts, own = full.parts, {entry.node: entry.key for entry in entries if entry.kind == BASE}
    for primary, shared in full.shared_bases.items():
        where, standby = f"shared_bases.{primary}", shared.standby
        if parts.get(standby) != primary:
            raise ValueError(f"{where}: {standby} is not a standby of {primary}")
        position = full.base[standby]
        if not full.base[primary] <= position <= full.cut.of(primary).start:
            raise ValueError(f"{where}: {position} is not between the base position and the cut")
        _check_pending(f"{where}.pending", shared.pending, position)
        if standby in own:
            raise ValueError(f"{where}: object {own[standby]} is a base copy of {standby} itself")


def _check_rows(full: FullSnapshot) -> None:
    numbers = {shard: {group.number for group in groups} for shard, groups in full.groups.items()}
    entries: tuple[NamedObject, ...] = (*full.copied, *full.lists)
    for stored in entries:
        if stored.node not in full.parts:
            raise ValueError(f"object {stored.key} belongs to node {stored.node}, which is not in the snapshot")
        known = (
            {LARGE_OBJECTS_COUNT} if stored.kind == LARGE_OBJECTS else numbers[full.parts[stored.node] or stored.node]
        )
        if not stored.rows.keys() <= known:
            raise ValueError(f"object {stored.key} contains rows of an unknown group")


def _check_same(what: str, found: Iterable[str], expected: set[str]) -> None:
    if set(found) != expected:
        raise ValueError(f"{what} lists {_names(found)} instead of {_names(expected)}")


def _names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"
