"""Compare a commit with the DDL that it lists: what tables, sequences, types and databases are in each of them.

The stored DDL is the only description of the tables that no commit contains. If both contradict each other, a restore
would load values into the wrong columns, or leave a table empty. Check and restore use the same rules and words: what a
check calls a conflict is not restored, and a restore refuses nothing else of this kind. A restore also compares the
commit with the tables that its DDL has created.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

from msgspec import Struct
from psycopg.postgres import types

from cutline.columns.lines import ESCAPES
from cutline.fleet.messages import CHECK_NAMED
from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.baseline import NodeIdentity
from cutline.nodes.encodings import RAW, UTF8, raw_bytes
from cutline.nodes.groups import Column, Group
from cutline.nodes.left_out import LeftOutKind
from cutline.nodes.table_state import FIELDS_STAMP, TableState
from cutline.snapshots.ddl.database_facts import READ_ONLY, list_elements
from cutline.snapshots.ddl.ddl_archive import DdlArchive
from cutline.snapshots.ddl.described_ddl import (
    DescribedDatabase,
    DescribedSequence,
    DescribedTable,
    Description,
    describe,
    read_privileges,
)
from cutline.snapshots.ddl.quoted_names import Name
from cutline.snapshots.ddl.unknown_names import unknown_names
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import DatabaseFacts, DatabaseProperties, Sequence
from cutline.storage.errors import RefusedError

# At most this many contradictions of each kind are listed.
NAMED_MAX = 5
# In a database with another encoding, the DDL has a name's bytes, and the commit has the name in UTF-8.
COMPARABLE_ENCODINGS = (UTF8, RAW)
# Roles that come with the server.
PREDEFINED = "pg_"
# The oids of built-in types and of their arrays, by name; they never change.
BUILT_IN: Mapping[str, tuple[int, int]] = {info.regtype: (info.oid, info.array_oid) for info in types}
# How the modifiers of built-in types are stored (PostgreSQL's src/backend/utils/adt: varchar.c, numeric.c,
# timestamp.c): with or without the 4 bytes of a length word, and the scale of a number in 11 bits.
MODIFIERS = re.compile(r"\((-?\d+(?:,-?\d+)?)\)")
NO_MODIFIER, VARLENA_HEADER, NUMERIC_SCALE, INTERVAL_OF_ALL_FIELDS = -1, 4, 0x7FF, 0x7FFF << 16
COUNTED = frozenset({"character varying", "character"})
CATALOG_SCHEMA = "pg_catalog"
# Names that need no quotes; a column is named with its schema and table.
PLAIN, NAMED_PARTS = re.compile(r"[a-z_][a-z0-9_]*"), 3


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
    own = {(one.schema, one.name) for one in chain.sequences(shard) if not one.is_of_extension}
    gone = [table_name(*name) for name in sorted(own - described.sequences.keys())]
    found += _some(f"the DDL does not create sequence {name}" for name in _comparable(gone, only_ascii=only_ascii))
    found += compare_sequences(chain, shard, described)
    found += compare_database(chain, shard, described)
    return found + _unlisted_roles(chain.roles(shard), described) + _some(described.impossible)


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
    for compared in (_other_table, _other_attributes):
        found += _some(problem for group, state in known for problem in compared(group, state, described))
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
    unlogged = {out.name for out in chain.left_out if out.node == shard and out.kind == LeftOutKind.UNLOGGED_TABLE}
    names = [table_name(*table) for table in sorted(described.tables.keys() - listed)]
    # A commit does not contain tables that were dropped while it was being created. Tables that the rules exclude have
    # no rows.
    included = [name for name in names if is_included(name, chain.full.rules)]
    unlisted = [name for name in included if name not in left_out]
    # The catalogs have the same fingerprint when the tables are listed and when the DDL is dumped, so a table that the
    # DDL creates as a logged one was logged then, too, and would have rows.
    logged = [name for name in included if name in unlogged]
    stored = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
    without = [table_name(*name) for name in sorted(described.sequences.keys() - stored)]
    valueless = [name for name in without if name not in left_out]
    return (
        _some(f"the commit lists no rows of table {name}" for name in _comparable(unlisted, only_ascii=only_ascii))
        + _some(
            f"table {name} is unlogged in the commit, but not in the DDL"
            for name in _comparable(logged, only_ascii=only_ascii)
        )
        + _some(
            f"the commit has no value for sequence {name}" for name in _comparable(valueless, only_ascii=only_ascii)
        )
    )


def compare_sequences(chain: Chain, shard: str, described: Description) -> list[str]:
    """Return which sequences of the chain's last commit count differently, or have values that the DDL excludes."""
    return _some(
        problem
        for sequence in chain.sequences(shard)
        if (one := described.sequences.get((sequence.schema, sequence.name))) is not None
        for problem in _differing_sequence(sequence, one)
    )


def compare_database(chain: Chain, shard: str, described: Description) -> list[str]:
    """Return how the database itself differs from the description: its identity, its properties and its extensions.

    A create reads the properties while the catalogs are those that its DDL was dumped from.
    """
    found = _differing_server(chain, shard, described)
    facts = chain.database_facts(shard)
    if described.database is not None:
        found += _differing_database(chain.baseline[shard], described.database)
        if facts is not None and facts.properties is not None:
            found += _differing_properties(facts.properties, described.database)
            found += _some(_differing_settings(facts.properties, described.database))
    if facts is not None and facts.extensions:
        # New databases have plpgsql, so the DDL does not create it.
        ours, theirs = facts.extensions.keys() - {"plpgsql"}, described.extensions - {"plpgsql"}
        found += _some(f"the DDL does not create extension {name}" for name in sorted(ours - theirs) if _is_ascii(name))
        found += _some(
            f"the commit does not list extension {name}" for name in sorted(theirs - ours) if _is_ascii(name)
        )
    if facts is not None:
        found += _some(_unknown_collations(facts, described)) + _some(_unknown_columns(facts, described))
    return found


def _unknown_collations(facts: DatabaseFacts, described: Description) -> Iterator[str]:
    """Yield the collations of the database that neither the DDL creates nor the server has."""
    for collation in facts.collations:
        name = table_name(collation.schema, collation.name)
        is_created = (collation.schema, collation.name) in described.collations
        if collation.is_own and not is_created and _is_ascii(name):
            yield f"the DDL does not create collation {name}"
        elif not collation.is_own and collation.schema != CATALOG_SCHEMA:
            yield f"collation {name} is listed as one of the server, which has none outside of {CATALOG_SCHEMA}"


def _unknown_columns(facts: DatabaseFacts, described: Description) -> Iterator[str]:
    """Yield the columns compressed with lz4 that their tables do not have in the DDL."""
    for listed in facts.lz4_columns:
        parts = listed.split(".")
        if len(parts) != NAMED_PARTS or not all(map(PLAIN.fullmatch, parts)):
            continue
        table = described.tables.get((parts[0], parts[1]))
        if table is None or not table.is_whole:
            continue
        if parts[2] not in table.generated and all(column.name != parts[2] for column in table.columns):
            yield f"the commit says that column {listed} is compressed with lz4, but the table has no such column"


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
        if stored is not None:
            named, found = (sorted(_comparable_forms(names, only_ascii=only_ascii)) for names in (ours, stored))
            if named != found:
                return named, found
        # The statement lacks inherited columns, and shows a generated column that it repeats as if it were stored.
        both = set(ours) & set(theirs)
        ours, theirs = [one for one in ours if one in both], [one for one in theirs if one in both]
    return _comparable_forms(ours, only_ascii=only_ascii), _comparable_forms(theirs, only_ascii=only_ascii)


def _comparable_forms(names: Iterable[str], *, only_ascii: bool) -> list[str]:
    """Return the names with "?" for each name that has another form in the DDL than in commits."""
    return ["?" if only_ascii and not _is_ascii(name) else name for name in names]


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
        if only_ascii and not (ours.isascii() and _is_ascii(theirs or "")):
            continue
        if theirs is None or ours == theirs:
            yield from _impossible_type(group, column, described)
            continue
        yield f"column {column.name} of table {group.name} has type {ours} in the commit, but {theirs} in the DDL"


def _impossible_type(group: Group, column: Column, described: Description) -> Iterator[str]:
    """Yield how the oid or the modifier of a column's type differ from those that its name stands for."""
    known = described.types.get(column.type.replace('"', ""))
    oid, modifier = built_in_type(column.type) if known is None else (known, NO_MODIFIER)
    where = f"column {column.name} of table {group.name} has type {column.type}"
    if oid is not None and oid != column.type_oid:
        yield f"{where}, whose oid is {oid}, but the commit says {column.type_oid}"
    elif modifier is not None and modifier != column.type_modifier:
        yield f"{where}, whose modifier is {modifier}, but the commit says {column.type_modifier}"


@lru_cache(maxsize=1 << 12)
def built_in_type(name: str) -> tuple[int | None, int | None]:
    """Return the oid and the modifier of a built-in type, by its name as format_type prints it; None if not known."""
    element = name.removesuffix("[]")
    found = MODIFIERS.search(element)
    bare = element[: found.start()] + element[found.end() :] if found else element
    oids = BUILT_IN.get(bare)
    if oids is None:
        return None, None
    oid = oids[element != name]
    if not found:
        # That of an interval may stand for all fields.
        return oid, None if bare == "interval" else NO_MODIFIER
    numbers = [int(number) for number in found[1].split(",")]
    if bare in COUNTED:
        return oid, numbers[0] + VARLENA_HEADER
    if bare == "numeric":
        scale = numbers[1] if len(numbers) > 1 else 0
        return oid, (numbers[0] << 16 | scale & NUMERIC_SCALE) + VARLENA_HEADER
    if bare == "interval":
        return oid, INTERVAL_OF_ALL_FIELDS | numbers[0]
    return oid, numbers[0]


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


def _other_attributes(group: Group, state: TableState, described: Description) -> Iterator[str]:
    """Yield how the numbers of a table's columns, or their number, differ from the rows that it has in pg_attribute."""
    numbers = state.numbers
    for column in group.columns:
        if column.number not in numbers:
            yield f"column {column.name} of table {group.name} has number {column.number}, which no column has"
    if numbers and max(numbers) > state.attributes:
        yield f"table {group.name} has had {state.attributes} columns, but one has number {max(numbers)}"
    table = described.tables.get((group.schema, group.table))
    # A statement may lack inherited columns.
    if table is not None and table.is_ordered and (found := len(table.columns) + len(table.generated)) != len(numbers):
        yield f"table {group.name} has {len(numbers)} columns in the commit, but {found} in the DDL"


def _differing_labels(
    known: Iterable[tuple[Group, TableState]], described: Description, *, is_utf8: bool
) -> Iterator[str]:
    """Yield a contradiction for every enum type that has other labels."""
    for group, state in known:
        for oid, ours in state.labels.items():
            raw = described.enums.get(oid)
            theirs = set(map(_readable, raw or ()))
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
    for what, ours, theirs in (("smallest", sequence.smallest, smallest), ("largest", sequence.largest, largest)):
        if theirs is not None and ours != theirs:
            yield f"the {what} value of sequence {name} is {ours} in the commit, but {theirs} in the DDL"
    if (smallest is not None and sequence.last_value < smallest) or (
        largest is not None and sequence.last_value > largest
    ):
        allowed = f"from {smallest} to {largest}"
        yield f"sequence {name} has value {sequence.last_value} in the commit, but the DDL allows values {allowed}"


class _Property(Struct, frozen=True):
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


def _differing_server(chain: Chain, shard: str, described: Description) -> list[str]:
    """Compare the version of the server: for the DDL of a base copy all of it, otherwise the major version.

    Somebody may update a server between two increments, or before DDL that changed during a full snapshot is dumped.
    """
    version = chain.baseline[shard].server_version
    ours = (version // 10000, version % 10000)
    is_of_copy = chain.last.increment == 0 and chain.full.definition_changes is None
    compared = len(described.server) if is_of_copy else min(len(described.server), 1)
    if ours[:compared] == described.server[:compared]:
        return []
    shown = [".".join(map(str, numbers[:compared])) for numbers in (ours, described.server)]
    return [f"the server has version {shown[0]} in the commit, but the DDL was dumped from version {shown[1]}"]


def _differing_properties(properties: DatabaseProperties, described: DescribedDatabase) -> list[str]:
    compared = [
        _Property("owner", properties.owner, described.owner),
        _Property("comment", *_comments(properties, described)),
        _Property("connection limit", properties.connection_limit, described.connection_limit),
        _Property("template flag", properties.is_template, described.is_template),
    ]
    if described.privileges is not None:
        theirs = _privileges_text(described.privileges)
        compared.append(_Property("privileges", _privileges_text(_privileges_of(properties)), theirs))
    return [
        f"the database has {one.what} {_shown(one.ours)} in the commit, but {_shown(one.theirs)} in the DDL"
        for one in compared
        if one.ours != one.theirs and all(_is_ascii(str(value)) for value in (one.ours, one.theirs))
    ]


def _comments(properties: DatabaseProperties, described: DescribedDatabase) -> tuple[str | None, str | None]:
    """Return both comments. If standard_conforming_strings is off, the DDL has another form of a backslash."""
    return ("", "") if "\\" in (properties.comment or "") else (properties.comment, described.comment)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)


def _privileges_of(properties: DatabaseProperties) -> dict[tuple[str, str], bool]:
    if properties.privileges is None:
        return read_privileges("", properties.owner) or {}
    found: dict[tuple[str, str], bool] = {}
    for one in properties.privileges:
        place = one.grantee, one.privilege
        found[place] = found.get(place, False) or one.with_grant_option
    return found


def _privileges_text(privileges: Mapping[tuple[str, str], bool]) -> str:
    named = (
        f"{privilege} of {grantee or 'PUBLIC'}{' with grant option' * can_grant}"
        for (grantee, privilege), can_grant in sorted(privileges.items())
    )
    return ", ".join(named) or "none"


def _differing_settings(properties: DatabaseProperties, described: DescribedDatabase) -> Iterator[str]:
    ours = {(one.role, one.name.lower()): one.value for one in properties.settings}
    theirs = {(role, name.lower()): value for (role, name), value in described.settings.items()}
    for role, setting in sorted(ours.keys() | theirs.keys()):
        given, dumped = ours.get((role, setting)), theirs.get((role, setting))
        # A terminal snapshot sets this one, and commits leave it out.
        if setting == READ_ONLY or (given is not None and dumped is not None and _is_value(given, dumped)):
            continue
        shown = ["not set" if given is None else given, "not set" if dumped is None else ", ".join(dumped)]
        # The DDL has the bytes of other encodings. The form of an empty list, and of a backslash, depends on pg_dump.
        if not given and dumped is None and given is not None:
            continue
        if "\\" in "".join(shown) or not all(map(_is_ascii, [role, setting, *shown])):
            continue
        where = f" for role {role}" if role else ""
        yield f"setting {setting} of the database{where} is {shown[0]} in the commit, but {shown[1]} in the DDL"


def _is_value(value: str, elements: tuple[str, ...]) -> bool:
    """Whether the elements, as DDL sets them, are the value of a setting as pg_db_role_setting has it."""
    return elements == (value,) or tuple(list_elements(value, folds=False)) == elements


def _unlisted_roles(roles: Iterable[str], described: Description) -> list[str]:
    """Return the owners in the DDL that the commit does not list as roles that a target needs."""
    unlisted = sorted(
        role for role in described.owners - set(roles) if not role.startswith(PREDEFINED) and _is_ascii(role)
    )
    return _some(f"the DDL names role {role} as an owner, but the commit does not list it" for role in unlisted)


def compare_names(ddl: DdlArchive) -> list[str]:
    """Return which statements of the DDL name something that it does not create. A server would refuse them."""
    return _some(unknown_names(ddl))


def changed_types(before: TableState, now: TableState, descriptions: tuple[Description, Description]) -> Iterator[str]:
    """Yield how types of a table's values differ between two descriptions although their rows in the catalogs do not.

    These are the number of fields of composite types, and the order of labels of enum types.
    """
    earlier, later = descriptions
    for stamp in sorted(set(before.types).intersection(now.types)):
        if (match := FIELDS_STAMP.match(stamp)) is not None:
            fields = [described.fields.get(int(match[1])) for described in descriptions]
            if fields[0] is not None and fields[1] is not None and len(fields[0]) != len(fields[1]):
                yield f"a composite type has {len(fields[1])} fields instead of {len(fields[0])}"
    for oid, labels in before.unchanged_labels(now).items():
        orders = [
            [label for label in map(_readable, described.enums.get(oid, ())) if label in labels]
            for described in (earlier, later)
        ]
        if set(orders[0]) == set(orders[1]) and orders[0] != orders[1]:
            yield f"an enum type has its labels in the order {', '.join(orders[1])} instead of {', '.join(orders[0])}"


def _readable(label: str) -> str:
    return raw_bytes(label).decode(errors="backslashreplace")


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
        # VALIDATE CONSTRAINT changes only the row of pg_constraint.
        is_validated = other.is_not_null and column.name in before.unproved
        if column.is_not_null != other.is_not_null and not is_validated:
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
