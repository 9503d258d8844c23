"""The rules for definitions of tables in commits: each is valid by itself, and together they continue those before.

Rows are read by what these say: a succession that is missing, or of another table, would drop or scramble rows without
anything else showing it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from cutline.fleet.tables.groups import Group
from cutline.fleet.tables.table_state import XML_STAMP, TableState
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import Commit, DefinitionChanges

PARTITIONS_MAX = 1024
# The identities whose groups have a key, and those whose groups have none.
KEYED, KEYLESS = frozenset({"default", "index"}), frozenset({"full", "append_only"})
# A value as `copy_text` writes it: nothing else in a line, and no part of what follows.
COPY_TEXT = re.compile(r"(?:[^\\\x08\t\n\v\f\r]|\\[bfnrtv\\]|\\x[89a-f][0-9a-f])*+")
XML_NUMBER = re.compile(rf"{XML_STAMP}[0-9]{{1,4}}")
NAMED_MAX = 5


def check_groups(where: str, groups: Iterable[Group]) -> None:
    """Raise ValueError unless every definition is valid, and none has the number of another."""
    groups = list(groups)
    check_distinct(where, "number", [group.number for group in groups])
    for group in groups:
        _check_group(f"{where}, group {group.number}", group)


def _check_group(where: str, group: Group) -> None:
    columns = group.columns
    if not group.number or group.number >= 1 << 31:
        raise ValueError(f"{where}: its number is not one of a group")
    if group.identity not in (KEYED if group.key_width else KEYLESS) or group.key_width > len(columns):
        raise ValueError(f"{where}: identity and key_width don't match")
    if not 1 <= group.partitions <= PARTITIONS_MAX or group.partitions & (group.partitions - 1):
        raise ValueError(f"{where}: partitions is no power of two up to {PARTITIONS_MAX}")
    check_distinct(where, "column name", [column.name for column in columns])
    if sorted(column.position for column in columns) != list(range(len(columns))):
        raise ValueError(f"{where}: the positions of its columns are not 0 to {len(columns) - 1}")
    # Early versions did not store numbers.
    if any(column.number for column in columns):
        check_distinct(where, "column number", [column.number for column in columns])
        if not all(column.number for column in columns):
            raise ValueError(f"{where}: a column has no number")
    for column in columns:
        if column.missing is not None and not COPY_TEXT.fullmatch(column.missing):
            raise ValueError(f"{where}: missing of column {column.name} is not a value in COPY's text format")


def check_same_kind(groups: Mapping[str, Iterable[Group]], *, named: bool) -> None:
    """Raise ValueError if a number is a table with a key on one shard and without on another, or with `named` another.

    Rows of all shards are folded together, by number.
    """
    found: dict[int, Group] = {}
    for some in groups.values():
        for group in some:
            other = found.setdefault(group.number, group)
            if group.is_multiset != other.is_multiset or (named and group.name != other.name):
                raise ValueError(f"groups has number {group.number} for different tables")


def check_states(where: str, states: Iterable[TableState]) -> None:
    """Raise ValueError unless the states are of different tables and their stamps can be read."""
    states = list(states)
    check_distinct(where, "table", [state.table for state in states])
    for state in states:
        if any(one.startswith(XML_STAMP) and not XML_NUMBER.fullmatch(one) for one in state.types):
            raise ValueError(f"{where}: types of {state.table} has a column without a number")


def check_definitions(before: Chain, changes: DefinitionChanges) -> None:
    """Raise ValueError unless every number names one definition, and every definition continues its own table."""
    for shard in before.full.groups:
        if not any(shard in one for one in (changes.groups, changes.gone, changes.successions)) and not changes.begun:
            continue
        known = before.definitions(shard)
        new = {group.number: group for group in changes.groups.get(shard, ())}
        successions, gone = changes.successions.get(shard, {}), changes.gone.get(shard, ())
        check_groups(f"schema_changes.groups.{shard}", changes.groups.get(shard, ()))
        if new.keys() & known.keys():
            raise ValueError(f"schema_changes.groups.{shard} uses a number twice")
        if not successions.keys() <= new.keys() or not set(successions.values()) <= known.keys():
            raise ValueError(f"schema_changes.successions.{shard} has a number without a definition")
        current = {group.number for group in before.groups(shard)}
        check_distinct(f"schema_changes.gone.{shard}", "number", gone)
        if not set(gone) <= current:
            raise ValueError(f"schema_changes.gone.{shard} has a number without a definition")
        check_distinct(f"schema_changes.successions.{shard}", "number", list(successions.values()))
        if not set(successions.values()) <= set(gone):
            raise ValueError(f"schema_changes.successions.{shard} continues a table that schema_changes.gone lacks")
        for number, old in successions.items():
            _check_continued(f"schema_changes.successions.{shard}.{number}", known[old], new[number])
        for node in before.full.parts:
            if before.shard_of(node) == shard and changes.begun.get(node, {}).keys() != new.keys():
                raise ValueError(f"schema_changes.begun.{node} does not match the new definitions")


def _check_continued(where: str, old: Group, new: Group) -> None:
    """Raise ValueError unless rows of the one definition can be converted to the other."""
    if old.is_multiset != new.is_multiset or old.partitions != new.partitions:
        raise ValueError(f"{where}: rows of group {old.number} can't be rows of group {new.number}")
    keys = [[column.number for column in group.columns[: group.key_width]] for group in (old, new)]
    if keys[0] != keys[1]:
        raise ValueError(f"{where}: group {old.number} has another key than group {new.number}")
    was, now = ({column.number for column in group.columns} for group in (old, new))
    # Attribute numbers grow; and a table in which columns were dropped and added is copied again (table_plan.py).
    if 0 not in was | now and ((was - now and now - was) or any(number < max(was) for number in now - was if was)):
        raise ValueError(f"{where}: group {new.number} has other columns than group {old.number} could get")


def check_tables(before: Chain | None, chain: Chain) -> None:
    """Raise ValueError unless every shard has each table once, and each table's state, at the chain's last commit."""
    for shard in chain.full.groups:
        groups = chain.groups(shard)
        check_distinct(f"groups.{shard}", "table", [group.name for group in groups])
        # Early commits have no states.
        had_all = before is None or len(before.tables(shard)) == len(before.groups(shard))
        states = chain.tables(shard)
        if chain.full.tables.get(shard) and had_all and len(states) < len(groups):
            lacking = sorted({group.name for group in groups} - states.keys())
            raise ValueError(f"tables.{shard} has no state of {', '.join(lacking[:NAMED_MAX])}")
        if before is not None and (changes := chain.last.definition_changes):
            _check_same_tables(before, states, changes, shard)


def _check_same_tables(before: Chain, states: Mapping[str, TableState], changes: DefinitionChanges, shard: str) -> None:
    """Raise ValueError if a definition continues that of a table with another oid."""
    old, states_before = before.definitions(shard), before.tables(shard)
    new = {group.number: group for group in changes.groups.get(shard, ())}
    if unknown := {state.table for state in changes.tables.get(shard, ())} - states.keys():
        raise ValueError(f"schema_changes.tables.{shard} has {sorted(unknown)[0]}, which is no group")
    for number, one in changes.successions.get(shard, {}).items():
        was, now = states_before.get(old[one].name), states.get(new[number].name)
        if was and now and was.oid != now.oid:
            raise ValueError(f"schema_changes.successions.{shard}.{number} continues another table")


def definition_counts(chain: Chain) -> dict[str, int]:
    """What a commit counts of definitions, so that none can go missing: tables at the cut, and those that it continues.

    `chain` ends with the commit. Early commits have no such counts.
    """
    changes = chain.last.definition_changes
    continued = sum(map(len, changes.successions.values())) if changes else 0
    return {"groups": sum(map(len, chain.all_groups.values())), "continued": continued}


def check_definition_counts(chain: Chain, commit: Commit) -> None:
    """Raise ValueError unless the commit's counts of definitions are right."""
    for name, count in definition_counts(chain).items():
        if commit.counts.get(name, count) != count:
            raise ValueError(f"counts.{name} is {commit.counts[name]}, but the commit has {count}")


def check_distinct(where: str, what: str, values: Iterable[Any]) -> None:
    """Raise ValueError if a value occurs twice."""
    for value, times in Counter(values).items():
        if times > 1:
            raise ValueError(f"{where} has {what} {str(value)[:100]!r} twice")
