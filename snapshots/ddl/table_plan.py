"""Plan each table between two commits: it is unchanged, converted, copied again, or gone.

A table is *converted* to a new definition if all rows stored under the previous one can be converted
(snapshots/fold/conversions.py), and every change in between is decoded under one of the two. If that is not certain,
the table is *copied again*, and its rows stored before no longer count. Nothing is guessed: columns are identified by
their attribute numbers, which PostgreSQL never reuses.

Plain values in and out; `snapshots.ddl.table_changes` asks the nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from msgspec import structs

from cutline.fleet.hints import NEW_CHAIN
from cutline.fleet.tables.groups import Column, Group, Table
from cutline.fleet.tables.publications import PublicationChangedError
from cutline.fleet.tables.table_state import TableState
from cutline.storage.errors import ChainEnd

# text and varchar: their values have the same text, and changing one to the other rewrites nothing.
TEXTS = frozenset({25, 1043})


@dataclass(frozen=True, slots=True)
class TableBefore:
    """A table as the previous commit has it, or as segments that no commit lists have it.

    For the latter `state` is None, and `is_copied` says that the attempt that archived them copied the table.
    """

    oid: int
    group: Group
    state: TableState | None = None
    is_copied: bool = False


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """A table with a new definition: converted from the definition `after`, or copied for `reason` if that is None."""

    table: Table
    after: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """What an increment does with a shard's tables. `gone` are the numbers of definitions that end.

    `states` are the current states of the tables, by name.
    """

    unchanged: tuple[Group, ...]
    changed: tuple[ChangedTable, ...]
    gone: tuple[int, ...]
    states: Mapping[str, TableState]

    @property
    def to_copy(self) -> tuple[Table, ...]:
        """The tables that need a new base copy."""
        return tuple(one.table for one in self.changed if one.after is None)

    @property
    def new_groups(self) -> tuple[Group, ...]:
        """The definitions that begin."""
        return tuple(one.table.group for one in self.changed)

    @property
    def successions(self) -> dict[int, int]:
        """For the number of each definition that is converted to, the number of the one before."""
        return {one.table.group.number: one.after for one in self.changed if one.after is not None}

    @property
    def groups(self) -> tuple[Group, ...]:
        """All groups of the shard."""
        return (*self.unchanged, *self.new_groups)


def plan_shard(
    node: str,
    before: Iterable[TableBefore],
    archived: Iterable[TableBefore],
    now: tuple[Iterable[Table], Mapping[str, TableState]],
    number: int,
    moved: Collection[int] = (),
) -> ShardPlan:
    """Compare the shard's tables `now`, with their states by name, with those of the previous commit.

    `archived` are the definitions in segments that no commit lists; `moved` are the oids of tables of which WAL has
    changes under an unknown definition. New definitions get numbers after `number`. Raises PublicationChangedError.
    """
    tables, states = now
    previous = {one.oid: one for one in before}
    attempts: dict[int, list[TableBefore]] = {}
    for one in archived:
        attempts.setdefault(one.oid, []).append(one)
    unchanged: list[Group] = []
    changed: list[ChangedTable] = []
    for table in tables:
        was, state, tried = previous.get(table.oid), states[table.group.name], attempts.get(table.oid, [])
        # Append-only tables are in another publication, which a table leaves when it gets an identity.
        is_same_kind = was and _is_append_only(was.group) == _is_append_only(table.group)
        if was and was.state and state.membership and is_same_kind:
            check_publication(node, was.state, state)
        reason = _why_copy(was, table, state, tried, is_moved=table.oid in moved)
        if not reason and was and not tried and was.group.definition() == table.group.definition():
            unchanged.append(was.group)
            continue
        number += 1
        if reason or was is None:
            changed.append(ChangedTable(_assign_number(table, number, table.group.partitions), None, reason))
            continue
        # Archived segments already use a number for this definition.
        new_number = tried[0].group.number if tried else number
        changed.append(ChangedTable(_assign_number(table, new_number, was.group.partitions), was.group.number))
    unchanged_numbers = {group.number for group in unchanged}
    gone = tuple(sorted(one.group.number for one in previous.values() if one.group.number not in unchanged_numbers))
    return ShardPlan(tuple(unchanged), tuple(changed), gone, dict(states))


def _assign_number(table: Table, number: int, partitions: int) -> Table:
    return replace(table, group=structs.replace(table.group, number=number, partitions=partitions))


def check_publication(node: str, before: TableState, after: TableState) -> None:
    """Raise PublicationChangedError if the publication itself was altered: all its tables may lack changes."""
    if before.publication != after.publication:
        raise PublicationChangedError(
            f"node {node}: table {after.table} is in a publication of Cutline that was altered since the last commit:"
            " the chain may lack changes made since",
            hint=NEW_CHAIN,
            ends_chain=ChainEnd.FOR_GOOD,
            details={"node": node, "tables": [after.table]},
        )


def _why_copy(
    was: TableBefore | None, table: Table, state: TableState, tried: list[TableBefore], *, is_moved: bool
) -> str:
    """Why the table needs a new base copy, "" if it does not."""
    if was is None:
        return "it is new"
    if is_moved:
        return "its columns differed in between, and rows were written then"
    if any(one.is_copied or one.group.definition() != table.group.definition() for one in tried):
        return "a failed attempt archived it under another definition"
    if was.state is None:
        return "its state at the last commit is not known"
    return _why_state(was.state, state) or _why_columns(was.group, was.state, table.group)


def _why_state(before: TableState, after: TableState) -> str:
    if before.membership != after.membership:
        return "it was taken out of Cutline's publication and put back"
    if before.file != after.file and before.columns != after.columns:
        return "it was rewritten"
    if before.printed - after.printed:
        return "a type of its columns prints its values differently"
    if _dropped_attributes(before, after):
        return "a column was added and dropped again"
    return ""


def _dropped_attributes(before: TableState, after: TableState) -> bool:
    """Whether an attribute that was added after `before` has been dropped."""
    live = {int(stamp.partition(".")[0]) for stamp in after.columns.split()}
    return any(number not in live for number in range(before.attributes + 1, after.attributes + 1))


def _why_columns(old: Group, before: TableState, new: Group) -> str:
    if _kind(old) != _kind(new):
        return "its replica identity changed"
    if [column.number for column in _key(old)] != [column.number for column in _key(new)]:
        return "its key changed"
    was = {column.number: column for column in old.columns}
    now = {column.number: column for column in new.columns}
    for number in was.keys() & now.keys():
        types = {was[number].type_oid, now[number].type_oid}
        if len(types) > 1 and not types <= TEXTS:
            return f"column {now[number].name} has another type"
    added, dropped = now.keys() - was.keys(), was.keys() - now.keys()
    if any(number <= before.attributes for number in added):
        return "a generated column became an ordinary one"
    if dropped and added:
        # Decoding could take one for the other: the dropped column may have had the other's name and type in between,
        # and a change between some types leaves no trace.
        return "a column was dropped and another added"
    return ""


def _is_append_only(group: Group) -> bool:
    return group.identity == "append_only"


def _kind(group: Group) -> str:
    """The kind of identity; rows keep their keys if it does not change."""
    return "key" if group.key_width else group.identity


def _key(group: Group) -> tuple[Column, ...]:
    return group.columns[: group.key_width]
