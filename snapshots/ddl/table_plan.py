"""What became of every table between two commits: unchanged, carried on, to be copied anew, or gone.

A table is *carried on* under a new definition where whatever is stored under the one before can be brought to it
(snapshots/fold/conversions.py), and every change in between is decoded under one of the two. Where that can't be told
for sure it is *copied anew*, and all that was stored of it before counts no more. Nothing is guessed: the attributes'
numbers, which PostgreSQL never uses twice, say which column is which.

Plain values in and out; `snapshots.ddl.table_changes` asks the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from fleet.hints import NEW_CHAIN
from fleet.tables.groups import Column, Group, Table
from fleet.tables.publications import PublicationChangedError
from fleet.tables.table_state import TableState

# Types whose values are the same text, so that changing one to the other rewrites nothing: text and varchar.
TEXTS = frozenset({25, 1043})


@dataclass(frozen=True, slots=True)
class TableBefore:
    """A table as the commit before has it, or as segments that no commit lists yet have it.

    `state` is None for the latter; `is_copied` if whoever archived them was copying it anew.
    """

    oid: int
    group: Group
    state: TableState | None = None
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """A table that has a new definition: with `after` carried on from that number, else copied anew for `reason`."""

    table: Table
    after: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What an increment makes of a shard's tables. `gone` are the numbers of definitions that end.

    `states` are the tables' now, by name.
    """

    unchanged: tuple[Group, ...]
    changed: tuple[ChangedTable, ...]
    gone: tuple[int, ...]
    states: Mapping[str, TableState]

    @property
    def copied(self) -> tuple[Table, ...]:
        """The tables to be copied anew."""
        return tuple(one.table for one in self.changed if one.after is None)

    @property
    def begun(self) -> tuple[Group, ...]:
        """The definitions that begin."""
        return tuple(one.table.group for one in self.changed)

    @property
    def successions(self) -> dict[int, int]:
        """By number of a definition that is carried on the one before."""
        return {one.table.group.number: one.after for one in self.changed if one.after is not None}

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of the shard."""
        return (*self.unchanged, *self.begun)


def plan_shard(
    node: str,
    before: Iterable[TableBefore],
    archived: Iterable[TableBefore],
    now: tuple[Iterable[Table], Mapping[str, TableState]],
    number: int,
    moved: Collection[int] = (),
) -> ShardPlan:
    """Compare the shard's tables `now`, with their states by name, with those of the commit before.

    `archived` is what segments that no commit lists say of definitions, `moved` the oids of tables that were changed
    under a definition that nobody knows. New definitions are numbered after `number`. Raises PublicationChangedError.
    """
    tables, states = now
    known = {one.oid: one for one in before}
    attempts: dict[int, list[TableBefore]] = {}
    for one in archived:
        attempts.setdefault(one.oid, []).append(one)
    unchanged: list[Group] = []
    changed: list[ChangedTable] = []
    for table in tables:
        was, state, tried = known.get(table.oid), states[table.group.name], attempts.get(table.oid, [])
        # An append-only table has a publication of its own, and is in another one once it has an identity.
        is_of_kind = was and _is_append_only(was.group) == _is_append_only(table.group)
        if was and was.state and state.membership and is_of_kind:
            check_publication(node, was.state, state)
        reason = _why_anew(was, table, state, tried, is_moved=table.oid in moved)
        if not reason and was and not tried and was.group.definition() == table.group.definition():
            unchanged.append(was.group)
            continue
        number += 1
        if reason or was is None:
            changed.append(ChangedTable(_assign_number(table, number, table.group.partitions), None, reason))
            continue
        # What was archived under that definition already has its number.
        same = tried[0].group.number if tried else number
        changed.append(ChangedTable(_assign_number(table, same, was.group.partitions), was.group.number))
    kept = {group.number for group in unchanged}
    gone = tuple(sorted(one.group.number for one in known.values() if one.group.number not in kept))
    return ShardPlan(tuple(unchanged), tuple(changed), gone, dict(states))


def _assign_number(table: Table, number: int, partitions: int) -> Table:
    return replace(table, group=structs.replace(table.group, number=number, partitions=partitions))


def check_publication(node: str, before: TableState, after: TableState) -> None:
    """Raise PublicationChangedError if the whole publication was altered since: all its tables may lack changes."""
    if before.publication != after.publication:
        raise PublicationChangedError(
            f"node {node}: table {after.table} is in a publication of Cutline's that was altered since the last commit:"
            " changes made in between are lost to the chain",
            hint=NEW_CHAIN,
            details={"node": node, "tables": [after.table]},
        )


def _why_anew(
    was: TableBefore | None, table: Table, state: TableState, tried: list[TableBefore], *, is_moved: bool
) -> str:
    """Why the table must be copied anew, "" if it need not be."""
    if was is None:
        return "it is new"
    if is_moved:
        return "it had other columns in between, and was changed then"
    if any(one.is_copied or one.group.definition() != table.group.definition() for one in tried):
        return "an attempt that failed knew it otherwise"
    if was.state is None:
        return "nothing is known of its state before"
    return _why_state(was.state, state) or _why_columns(was.group, was.state, table.group)


def _why_state(before: TableState, after: TableState) -> str:
    if before.membership != after.membership:
        return "it was taken out of Cutline's publication and put back"
    if before.file != after.file and before.columns != after.columns:
        return "it was rewritten"
    if before.printed - after.printed:
        return "a type of its columns prints other values than before"
    if _dropped_attributes(before, after):
        return "a column was added and dropped again"
    return ""


def _dropped_attributes(before: TableState, after: TableState) -> bool:
    """Whether an attribute that is newer than `before` is not there any more."""
    live = {int(stamp.partition(".")[0]) for stamp in after.columns.split()}
    return any(number not in live for number in range(before.attributes + 1, after.attributes + 1))


def _why_columns(old: Group, before: TableState, new: Group) -> str:
    if _kind(old) != _kind(new):
        return "its replica identity is another"
    if [column.number for column in _key(old)] != [column.number for column in _key(new)]:
        return "its key is another"
    was = {column.number: column for column in old.columns}
    now = {column.number: column for column in new.columns}
    for number in was.keys() & now.keys():
        types = {was[number].type_oid, now[number].type_oid}
        if len(types) > 1 and not types <= TEXTS:
            return f"column {now[number].name} is of another type"
    added, dropped = now.keys() - was.keys(), was.keys() - now.keys()
    if any(number <= before.attributes for number in added):
        return "a generated column became an ordinary one"
    if dropped and added:
        # The one could pass for the other in what was decoded: it may have had the other's name and type in between,
        # and between some types that leaves no trace.
        return "a column was dropped and another added"
    return ""


def _is_append_only(group: Group) -> bool:
    return group.identity == "append_only"


def _kind(group: Group) -> str:
    """Identities between which rows stay keyed alike."""
    return "key" if group.key_width else group.identity


def _key(group: Group) -> tuple[Column, ...]:
    return group.columns[: group.key_width]
