"""Compare a commit with the DDL that it lists: what the tables and sequences are in each of them.

The stored DDL is the only description of the tables that no commit contains. If both contradict each other, a restore
would load values into the wrong columns, or leave a table empty. No server is needed: pg_dump writes one CREATE TABLE
for each table, with the columns in the order of their numbers and all identifiers quoted (pg_dump.c, dumpTableSchema).
`restore` compares the same in the restored database (restore/run/build.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.encodings import raw_bytes
from cutline.nodes.groups import Group
from cutline.snapshots.ddl.ddl_archive import (
    CONSTRAINT,
    EXTENSION,
    SEQUENCE,
    TABLE,
    DdlArchive,
    statements_of_entry,
)
from cutline.snapshots.records.chain import Chain

# At most this many contradictions of each kind are listed.
NAMED_MAX = 5
# In a database with another encoding, the DDL has a name's bytes, and the commit has the name in UTF-8.
COMPARABLE_ENCODINGS = ("UTF8", "SQL_ASCII")
# A doubled quote is read as two adjacent strings. The server writes no quote after a backslash.
STRING = r"""[eE]?'[^']*'|"[^"]*"|--[^\n]*"""
PART = re.compile(rf"{STRING}|(?P<mark>[(),])")
NAME = re.compile(r'"((?:[^"]|"")*)"')
# What follows the type of a column. Types contain these words only in lowercase, or quoted.
AFTER_TYPE = re.compile(rf"{STRING}|\s(?P<word>COLLATE|CONSTRAINT|DEFAULT|GENERATED|NOT NULL|WITH OPTIONS)\b")
KEY = re.compile(r"\sPRIMARY KEY \(((?:\"[^\"]*\"|[^()\"])*)\)")
# A partitioned table has no rows of its own. Tables of the other two kinds have columns that their statements omit.
KIND = re.compile(rf"{STRING}|\s(?P<word>PARTITION BY|INHERITS|OF) ")

Name = tuple[str, str]


@dataclass(frozen=True, slots=True)
class DescribedColumn:
    """A stored column; `type` is as format_type prints it, without quotes."""

    name: str
    type: str


@dataclass(frozen=True, slots=True)
class DescribedTable:
    """An ordinary table in the DDL. If not `is_whole`, it has further columns, which it inherits."""

    columns: tuple[DescribedColumn, ...]
    is_whole: bool


@dataclass(frozen=True, slots=True)
class Described:
    """The permanent tables, their primary keys and the sequences in a shard's DDL, keyed by schema and name."""

    tables: Mapping[Name, DescribedTable]
    keys: Mapping[Name, frozenset[str]]
    sequences: frozenset[Name]
    has_extensions: bool


def describe(archive: DdlArchive) -> Described:
    """Read the description from the statements in an archive."""
    tables: dict[Name, DescribedTable] = {}
    keys: dict[Name, frozenset[str]] = {}
    sequences: set[Name] = set()
    has_extensions = False
    ddl = archive.body
    for entry in archive.contents.entries:
        name = _shown(entry.schema), _shown(entry.name)
        if entry.kind == TABLE:
            text = statements_of_entry(ddl, entry)
            if text.startswith("CREATE TABLE ") and (table := read_table(text)) is not None:
                tables[name] = table
        elif entry.kind == CONSTRAINT:
            if key := KEY.search(text := statements_of_entry(ddl, entry)):
                # The statement is ALTER TABLE ONLY "schema"."table" ADD CONSTRAINT …
                schema, of = (_shown(_unquoted(quoted)) for quoted in NAME.findall(text)[:2])
                keys[schema, of] = frozenset(_shown(_unquoted(quoted)) for quoted in NAME.findall(key[1]))
        elif entry.kind == SEQUENCE:
            sequences.add(name)
        has_extensions |= entry.kind == EXTENSION
    return Described(tables, keys, frozenset(sequences), has_extensions)


def contradictions(chain: Chain, shard: str, described: Described) -> list[str]:
    """Return how the chain's last commit and the DDL of `shard` contradict each other, at most NAMED_MAX of each kind.

    Names that are not ASCII are compared only if the database's encoding is UTF8 or SQL_ASCII.
    """
    groups = chain.groups(shard)
    only_ascii = chain.baseline[shard].encoding not in COMPARABLE_ENCODINGS
    found: list[str] = []
    for problems in (_missing_tables, _differing_columns, _differing_types, _differing_keys):
        found += _some([problem for group in groups for problem in problems(group, described, only_ascii=only_ascii)])
    listed = {(group.schema, group.table) for group in groups}
    left_out = {out.name for out in chain.left_out if out.node == shard}
    names = [table_name(*table) for table in sorted(described.tables.keys() - listed)]
    unlisted = [name for name in names if name not in left_out and is_included(name, chain.full.rules)]
    stored = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
    without = [table_name(*name) for name in sorted(described.sequences - stored)]
    found += _some(
        [f"the commit lists no rows of table {name}" for name in _comparable(unlisted, only_ascii=only_ascii)]
    )
    valueless = [name for name in _comparable(without, only_ascii=only_ascii) if name not in left_out]
    found += _some([f"the commit has no value for sequence {name}" for name in valueless])
    if not described.has_extensions:
        # Extensions create sequences, too; the commit does not say which ones.
        gone = [table_name(*name) for name in sorted(stored - described.sequences)]
        found += _some(
            [f"the DDL does not create sequence {name}" for name in _comparable(gone, only_ascii=only_ascii)]
        )
    return found


def _some(problems: list[str]) -> list[str]:
    more = len(problems) - NAMED_MAX
    return [*problems[:NAMED_MAX], f"{more} more contradictions of this kind"] if more > 0 else problems


def _comparable(names: Iterable[str], *, only_ascii: bool) -> Iterator[str]:
    # The DDL's form of a name that is not ASCII contains a backslash.
    return (name for name in names if not only_ascii or (name.isascii() and "\\x" not in name))


def _missing_tables(group: Group, described: Described, *, only_ascii: bool) -> Iterator[str]:
    if (group.schema, group.table) not in described.tables and (group.name.isascii() or not only_ascii):
        yield f"the DDL does not create table {group.name}"


def _columns(group: Group, described: Described, *, only_ascii: bool) -> tuple[list[str], list[str]]:
    """Return the names of the table's columns, in order, in the commit and in the DDL."""
    table = described.tables.get((group.schema, group.table))
    if table is None:
        return [], []
    ours = [column.name for column in sorted(group.columns, key=lambda column: column.position)]
    theirs = [column.name for column in table.columns]
    if not table.is_whole:
        # The statement lacks inherited columns, and shows a generated one that it repeats as if it were stored.
        both = set(ours) & set(theirs)
        ours, theirs = [name for name in ours if name in both], [name for name in theirs if name in both]
    if only_ascii:
        ours = [name if name.isascii() else "?" for name in ours]
        theirs = [name if name.isascii() and "\\x" not in name else "?" for name in theirs]
    return ours, theirs


def _differing_columns(group: Group, described: Described, *, only_ascii: bool) -> Iterator[str]:
    ours, theirs = _columns(group, described, only_ascii=only_ascii)
    if ours != theirs:
        yield f"table {group.name} has columns {', '.join(ours)} in the commit, but {', '.join(theirs)} in the DDL"


def _differing_types(group: Group, described: Described, *, only_ascii: bool) -> Iterator[str]:
    table = described.tables.get((group.schema, group.table))
    if table is None:
        return
    types = {column.name: column.type for column in table.columns}
    for column in group.columns:
        ours, theirs = column.type.replace('"', ""), types.get(column.name)
        if theirs is None or ours == theirs or (only_ascii and not (ours.isascii() and "\\x" not in theirs)):
            continue
        yield f"column {column.name} of table {group.name} has type {ours} in the commit, but {theirs} in the DDL"


def _differing_keys(group: Group, described: Described, *, only_ascii: bool) -> Iterator[str]:
    key = frozenset(column.name for column in group.columns[: group.key_width])
    if group.identity != "default" or (only_ascii and not all(name.isascii() for name in key)):
        return
    ours, theirs = _columns(group, described, only_ascii=only_ascii)
    # Other columns are a contradiction of their own.
    if ours and ours == theirs and key != described.keys.get((group.schema, group.table)):
        yield f"table {group.name} has key {', '.join(sorted(key))} in the commit, but not in the DDL"


# Most statements are the same in every DDL of a chain.
@lru_cache(maxsize=1 << 15)
def read_table(text: str) -> DescribedTable | None:
    """Read a CREATE TABLE statement; None if it is a partitioned table, which has no rows of its own."""
    columns_list = _split(text)
    around = f"{text[: columns_list.start]} {text[columns_list.end :].partition(';')[0]}"
    kinds = {match["word"] for match in KIND.finditer(around) if match["word"]}
    if "PARTITION BY" in kinds:
        return None
    columns: list[DescribedColumn] = []
    for item in columns_list.items:
        name = NAME.match(item)
        if name is None:
            # A constraint of the table.
            continue
        after = item[name.end() :]
        word = next((match for match in AFTER_TYPE.finditer(after) if match["word"]), None)
        if word and word["word"] == "GENERATED":
            continue
        type_ = after[: word.start()] if word else after
        if type_.strip():
            columns.append(DescribedColumn(_shown(_unquoted(name[1])), _shown(type_.strip().replace('"', ""))))
    return DescribedTable(tuple(columns), is_whole=not kinds)


@dataclass(frozen=True, slots=True)
class _ColumnsList:
    """The items between the parentheses of a CREATE TABLE statement, and where they start and end."""

    items: list[str]
    start: int
    end: int


def _split(text: str) -> _ColumnsList:
    """Return the list of columns; without items if the statement has no list.

    A statement without a list, of a typed table, may have parentheses after PARTITION BY.
    """
    items: list[str] = []
    depth = begin = first = 0
    for match in PART.finditer(text):
        mark = match["mark"]
        if mark == "(":
            depth += 1
            if depth == 1:
                first = begin = match.end()
                if any(kind["word"] == "PARTITION BY" for kind in KIND.finditer(f"{text[:first]} ")):
                    return _ColumnsList([], first, first)
        elif mark and depth == 1:
            items.append(text[begin : match.start()].strip())
            begin = match.end()
            if mark == ")":
                return _ColumnsList(items, first, match.end())
        if mark == ")":
            depth -= 1
    return _ColumnsList([], len(text), len(text))


def _unquoted(name: str) -> str:
    return name.replace('""', '"')


def _shown(name: str) -> str:
    return raw_bytes(name).decode(errors="backslashreplace")
