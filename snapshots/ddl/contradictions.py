"""Compare a commit with the DDL that it lists: what tables, sequences, types and databases are in each of them.

The stored DDL is the only description of the tables that no commit contains. If both contradict each other, a restore
would load values into the wrong columns, or leave a table empty. Check and restore use the same rules and words: what a
check calls a conflict is not restored, and a restore refuses nothing else of this kind. A restore also compares the
commit with the tables that its DDL has created.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cutline.columns.lines import ESCAPES
from cutline.fleet.messages import CHECK_NAMED
from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.encodings import RAW, UTF8, raw_bytes
from cutline.nodes.groups import Group
from cutline.nodes.table_state import TableState
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_ddl import (
    DescribedDatabase,
    DescribedSequence,
    DescribedTable,
    Description,
    Name,
    describe,
)
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabaseFacts, Sequence
from cutline.storage.errors import RefusedError

# At most this many contradictions of each kind are listed.
NAMED_MAX = 5
# In a database with another encoding, the DDL has a name's bytes, and the commit has the name in UTF-8.
COMPARABLE_ENCODINGS = (UTF8, RAW)
# The stamp of an enum's label: the oids of the type and the label, the label, and the xmin of its row.
LABEL_STAMP = re.compile(r"enum (\d+) \d+ (.*)\.\d+", re.DOTALL)
# Roles that come with the server.
PREDEFINED = "pg_"


class DdlContradictedError(RefusedError):
    """A commit and the DDL that it lists contradict each other."""

    def __init__(self, shard: str, details: Iterable[str]) -> None:
        super().__init__(
            f"the commit and the stored DDL of shard {shard} contradict each other: {'; '.join(details)}",
            hint=[
                f"somebody changed the store; to see which objects to put back from a copy of it: {CHECK_NAMED}",
                "if that finds no conflict, restore an increment before the last change of the DDL; for the increments:"
                " snapshot show NAME",
                "or create the tables yourself, and restore only the rows into them: snapshot restore NAME --data-only",
            ],
            details={"node": shard},
        )


def contradictions(chain: Chain, shard: str, ddl: DdlArchive, groups: Iterable[Group] | None = None) -> list[str]:
    """Return how the chain's last commit and the DDL of `shard` contradict each other, at most NAMED_MAX of each kind.

    Of the tables with rows, compares only `groups` (None: all). Names that are not ASCII are compared only if the
    database's encoding is UTF8 or SQL_ASCII.
    """
    return compare(chain, shard, describe(ddl), groups)


def compare(chain: Chain, shard: str, described: Description, groups: Iterable[Group] | None = None) -> list[str]:
    """Do the same as `contradictions`, for DDL that was described before."""
    chosen = chain.groups(shard) if groups is None else tuple(groups)
    only_ascii = is_only_ascii(chain, shard)
    found = compare_definitions(chain, shard, described, chosen, only_ascii=only_ascii)
    found += compare_lists(chain, shard, described, only_ascii=only_ascii)
    if not described.extensions:
        # Extensions create sequences, too; the commit does not say which ones.
        stored = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
        gone = [table_name(*name) for name in sorted(stored - described.sequences.keys())]
        found += _some(f"the DDL does not create sequence {name}" for name in _comparable(gone, only_ascii=only_ascii))
    found += compare_sequences(chain, shard, described)
    if described.database is not None:
        found += _differing_database(chain.baseline[shard], described.database)
    found += _unlisted_roles(chain.roles(shard), described)
    return found + _unlisted_extensions(chain.database_facts(shard), described) + _some(described.impossible)


def compare_definitions(
    chain: Chain, shard: str, described: Description, groups: Iterable[Group], *, only_ascii: bool
) -> list[str]:
    """Return how the definitions of `groups`, which the chain's last commit lists, contradict the description."""
    groups = tuple(groups)
    found = compare_tables(described, groups, only_ascii=only_ascii)
    for problems in (_differing_types, _differing_keys):
        found += _some(problem for group in groups for problem in problems(group, described, only_ascii=only_ascii))
    states = chain.tables(shard)
    known = [(group, states[group.name]) for group in groups if group.name in states]
    found += _some(problem for group, state in known for problem in _other_table(group, state, described))
    is_utf8 = chain.baseline[shard].encoding == UTF8
    return found + _some(_differing_labels(known, described, is_utf8=is_utf8))


def compare_tables(described: Description, groups: Iterable[Group], *, only_ascii: bool) -> list[str]:
    """Return which tables of `groups` the description lacks, and which have other columns in it."""
    found: list[str] = []
    for problems in (_missing_tables, _differing_columns):
        found += _some(problem for group in groups for problem in problems(group, described, only_ascii=only_ascii))
    return found


def compare_lists(chain: Chain, shard: str, described: Description, *, only_ascii: bool) -> list[str]:
    """Return the tables and sequences that are in the description, but that the chain's last commit does not list."""
    listed = {(group.schema, group.table) for group in chain.groups(shard)}
    left_out = {out.name for out in chain.left_out if out.node == shard}
    names = [table_name(*table) for table in sorted(described.tables.keys() - listed)]
    # A commit does not contain tables that were dropped while it was being created. Tables that the rules exclude have
    # no rows.
    unlisted = [name for name in names if name not in left_out and is_included(name, chain.full.rules)]
    stored = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
    without = [table_name(*name) for name in sorted(described.sequences.keys() - stored)]
    valueless = [name for name in without if name not in left_out]
    return _some(
        f"the commit lists no rows of table {name}" for name in _comparable(unlisted, only_ascii=only_ascii)
    ) + _some(f"the commit has no value for sequence {name}" for name in _comparable(valueless, only_ascii=only_ascii))


def compare_sequences(chain: Chain, shard: str, described: Description) -> list[str]:
    """Return which sequences of the chain's last commit count differently, or have values that the DDL excludes."""
    return _some(
        problem
        for sequence in chain.sequences(shard)
        if (one := described.sequences.get((sequence.schema, sequence.name))) is not None
        for problem in _differing_sequence(sequence, one)
    )


def is_only_ascii(chain: Chain, shard: str) -> bool:
    """Whether only names in ASCII have the same form in the shard's DDL and in commits."""
    return chain.baseline[shard].encoding not in COMPARABLE_ENCODINGS


def _some(problems: Iterable[str]) -> list[str]:
    problems = list(dict.fromkeys(problems))
    more = len(problems) - NAMED_MAX
    return [*problems[:NAMED_MAX], f"{more} more contradictions of this kind"] if more > 0 else problems


def _comparable(names: Iterable[str], *, only_ascii: bool) -> Iterator[str]:
    # The DDL's form of a name that is not ASCII contains a backslash.
    return (name for name in names if not only_ascii or _is_ascii(name))


def _is_ascii(name: str) -> bool:
    return name.isascii() and "\\x" not in name


def _missing_tables(group: Group, described: Description, *, only_ascii: bool) -> Iterator[str]:
    if (group.schema, group.table) not in described.tables and (group.name.isascii() or not only_ascii):
        yield f"the DDL does not create table {group.name}"


def _columns(group: Group, described: Description, *, only_ascii: bool) -> tuple[list[str], list[str]]:
    """Return the names of the table's columns in the commit and in the DDL: in order, if the DDL tells the order."""
    name = (group.schema, group.table)
    table = described.tables.get(name)
    if table is None:
        return [], []
    ours = [column.name for column in sorted(group.columns, key=lambda column: column.position)]
    theirs = [column.name for column in table.columns]
    if not table.is_ordered:
        stored = described.stored_columns(name)
        if stored is not None and stored != set(ours):
            ours, theirs = sorted(ours), sorted(stored)
        else:
            # The statement lacks inherited columns, and shows a generated one that it repeats as if it were stored.
            both = set(ours) & set(theirs)
            ours, theirs = [one for one in ours if one in both], [one for one in theirs if one in both]
    if only_ascii:
        ours = [one if one.isascii() else "?" for one in ours]
        theirs = [one if _is_ascii(one) else "?" for one in theirs]
    return ours, theirs


def _differing_columns(group: Group, described: Description, *, only_ascii: bool) -> Iterator[str]:
    ours, theirs = _columns(group, described, only_ascii=only_ascii)
    if ours != theirs:
        yield f"table {group.name} has columns {', '.join(ours)} in the commit, but {', '.join(theirs)} in the DDL"


def _differing_types(group: Group, described: Description, *, only_ascii: bool) -> Iterator[str]:
    table = described.tables.get((group.schema, group.table))
    if table is None:
        return
    types = {column.name: column.type for column in table.columns}
    for column in group.columns:
        ours, theirs = column.type.replace('"', ""), types.get(column.name)
        if theirs is None or ours == theirs or (only_ascii and not (ours.isascii() and _is_ascii(theirs))):
            continue
        yield f"column {column.name} of table {group.name} has type {ours} in the commit, but {theirs} in the DDL"


def _differing_keys(group: Group, described: Description, *, only_ascii: bool) -> Iterator[str]:
    table = described.tables.get((group.schema, group.table))
    key = frozenset(column.name for column in group.columns[: group.key_width])
    if table is None or (only_ascii and not all(name.isascii() for name in (group.name, *key))):
        return
    ours, theirs = _columns(group, described, only_ascii=only_ascii)
    # Other columns are a contradiction of their own.
    if ours == theirs and not _has_key(group, key, table, described):
        what = f"key {', '.join(sorted(key))}" if key else f"replica identity {group.identity}"
        yield f"table {group.name} has {what} in the commit, but not in the DDL"


def _has_key(group: Group, key: frozenset[str], table: DescribedTable, described: Description) -> bool:
    """Whether the DDL gives the table the replica identity that the commit says it has."""
    name = (group.schema, group.table)
    if group.identity == "full":
        return table.has_full_identity
    if group.identity == "index":
        return described.identities.get(name) == key
    return group.identity != "default" or described.keys.get(name) == key


def _other_table(group: Group, state: TableState, described: Description) -> Iterator[str]:
    oid = described.oids.get((group.schema, group.table))
    if oid is not None and oid != state.oid:
        yield f"table {group.name} has oid {state.oid} in the commit, but {oid} in the DDL"


def _differing_labels(
    known: Iterable[tuple[Group, TableState]], described: Description, *, is_utf8: bool
) -> Iterator[str]:
    """Yield a contradiction for every enum type that has other labels."""
    for group, state in known:
        labels: dict[int, set[str]] = {}
        for stamp in state.types:
            if match := LABEL_STAMP.fullmatch(stamp):
                labels.setdefault(int(match[1]), set()).add(match[2])
        for oid, ours in labels.items():
            raw = described.enums.get(oid)
            theirs = {raw_bytes(label).decode(errors="backslashreplace") for label in raw or ()}
            # In other encodings, a commit has escapes for labels that are not ASCII.
            if raw is not None and ours != theirs and (is_utf8 or all(map(str.isascii, raw))):
                yield (
                    f"an enum type of table {group.name} has labels {', '.join(sorted(ours))} in the commit,"
                    f" but {', '.join(sorted(theirs))} in the DDL"
                )


def _differing_sequence(sequence: Sequence, described: DescribedSequence) -> Iterator[str]:
    name = table_name(sequence.schema, sequence.name)
    if sequence.increment != described.increment:
        yield f"sequence {name} has increment {sequence.increment} in the commit, but {described.increment} in the DDL"
    if sequence.cycles != described.cycles:
        where = ("commit", "DDL") if sequence.cycles else ("DDL", "commit")
        yield f"sequence {name} cycles in the {where[0]}, but not in the {where[1]}"
    smallest, largest = described.smallest, described.largest
    for what, ours, theirs in (
        ("smallest", sequence.smallest, smallest), ("largest", sequence.largest, largest)):  # fmt: skip
        if ours is not None and theirs is not None and ours != theirs:
            yield f"the {what} value of sequence {name} is {ours} in the commit, but {theirs} in the DDL"
    if (smallest is not None and sequence.last_value < smallest) or (
        largest is not None and sequence.last_value > largest
    ):
        allowed = f"from {smallest} to {largest}"
        yield f"sequence {name} has value {sequence.last_value} in the commit, but the DDL allows values {allowed}"


@dataclass(frozen=True, slots=True)
class _Property:
    """A property of a database, in words, in the commit and in the DDL."""

    what: str
    ours: object
    theirs: object


def _differing_database(identity: NodeIdentity, described: DescribedDatabase) -> list[str]:
    properties = [
        _Property("name", identity.database, described.name),
        _Property("oid", identity.database_oid, described.oid),
        _Property("encoding", identity.encoding, described.encoding),
        _Property("collation", identity.collate, described.collate),
        _Property("character type", identity.ctype, described.ctype),
        _Property("locale provider", identity.locale_provider, described.locale_provider),
        _Property("locale", identity.locale, described.locale),
        _Property("ICU rules", identity.icu_rules, described.icu_rules),
    ]
    return [
        f"the database has {one.what} {one.ours or 'none'} in the commit, but {one.theirs or 'none'} in the DDL"
        for one in properties
        # Names in any encoding may be part of these.
        if one.ours != one.theirs and all(_is_ascii(str(value)) for value in (one.ours, one.theirs))
    ]


def _unlisted_roles(roles: Iterable[str], described: Description) -> list[str]:
    """Return the owners in the DDL that the commit does not list as roles that a target needs."""
    unlisted = sorted(
        role for role in described.owners - set(roles) if not role.startswith(PREDEFINED) and _is_ascii(role)
    )
    return _some(f"the DDL names role {role} as an owner, but the commit does not list it" for role in unlisted)


def _unlisted_extensions(facts: DatabaseFacts | None, described: Description) -> list[str]:
    """Return the extensions that the DDL creates although the database had none of these names at the cut."""
    unlisted = sorted(described.extensions - facts.extensions.keys()) if facts else []
    return _some(
        f"the DDL creates extension {name}, but the commit does not list it" for name in unlisted if _is_ascii(name)
    )


def labels_of(described: Description) -> Mapping[int, frozenset[bytes]]:
    """Return the labels of the enum types, keyed by the oid of the type, as COPY prints them."""
    return {
        oid: frozenset(_copy_bytes(raw_bytes(label)) for label in labels) for oid, labels in described.enums.items()
    }


def changed_columns(name: Name, before: Description, now: Description) -> list[str]:
    """Return how NOT NULL and the defaults of a table's columns differ between two descriptions, in words.

    Compares only what can't differ without a change to the rows of pg_attribute: whether a column is NOT NULL, whether
    it has a default, and defaults that are constants, which name no other object.
    """
    found: list[str] = []
    columns = {column.name: column for column in now.tables[name].columns}
    for column in before.tables[name].columns:
        other = columns.get(column.name)
        if other is None:
            continue
        if column.is_not_null != other.is_not_null:
            found.append(f"column {column.name} is {'not ' * (not other.is_not_null)}NOT NULL")
        defaults = [one.default_of((*name, column.name)) for one in (before, now)]
        if (defaults[0] is None) != (defaults[1] is None):
            found.append(f"column {column.name} has {'no' if defaults[1] is None else 'a'} default")
        elif defaults[0] != defaults[1] and all(default is not None and is_constant(default) for default in defaults):
            found.append(f"column {column.name} has default {defaults[1]} instead of {defaults[0]}")
    return found


# A constant of a built-in type. The name of another type may change with the type.
CONSTANT = re.compile(
    r"-?[0-9][0-9.]*|true|false|'(?:[^']|'')*'(?:::(?:\"(?:text|numeric|date|uuid|jsonb|json|bpchar)\"|[a-z ]+))?"
)


def is_constant(default: str) -> bool:
    """Whether the expression of a default is a constant of a built-in type."""
    return CONSTANT.fullmatch(default) is not None


def _copy_bytes(value: bytes) -> bytes:
    return b"".join(b"\\" + ESCAPES[byte] if byte in ESCAPES else bytes([byte]) for byte in value)
