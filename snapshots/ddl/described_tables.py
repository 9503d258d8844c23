"""Compare a commit with the DDL that it lists: what the tables and sequences are in each of them.

The stored DDL is the only description of the tables that no commit contains. If both contradict each other, a restore
would load values into the wrong columns, or leave a table empty. pg_dump writes one CREATE TABLE for each table
(pg_dump.c, dumpTableSchema): columns in the order of their numbers, all identifiers quoted. No server is needed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from cutline.fleet.table_names import is_included, table_name
from cutline.nodes.encodings import raw_bytes
from cutline.nodes.groups import Column, Group
from cutline.snapshots.ddl.ddl_archive import SEQUENCE, read_contents, statements_of_entry
from cutline.snapshots.records.chain import Chain

TABLE, CONSTRAINT = "TABLE", "CONSTRAINT"
NAMED_MAX = 5
# A doubled quote is read as two adjacent strings. The server writes no quote after a backslash.
STRING = r"""[eE]?'[^']*'|"[^"]*"|--[^\n]*"""
PART = re.compile(rf"{STRING}|(?P<mark>[(),])")
NAME = re.compile(r'"((?:[^"]|"")*)"')
# What follows the type of a column. Types contain these words only in lowercase, or quoted.
AFTER_TYPE = re.compile(
    rf"{STRING}|\s(?P<word>COLLATE|COMPRESSION|CONSTRAINT|DEFAULT|GENERATED|NOT NULL|STORAGE|WITH OPTIONS)\b"
)
KEY = re.compile(r"\sPRIMARY KEY \(((?:\"[^\"]*\"|[^()\"])*)\)")
# These tables have columns that their statements don't repeat.
INHERITING = re.compile(r"\sINHERITS \(|\sOF \"")


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
    """The permanent tables, primary keys and sequences in a shard's DDL, keyed by schema and name."""

    tables: Mapping[tuple[str, str], DescribedTable]
    keys: Mapping[tuple[str, str], frozenset[str]]
    sequences: frozenset[tuple[str, str]]


def describe(ddl: bytes) -> Described:
    """Read the description from a pg_dump archive; raise DumpFormatError if it can't be read."""
    tables: dict[tuple[str, str], DescribedTable] = {}
    keys: dict[tuple[str, str], frozenset[str]] = {}
    sequences: set[tuple[str, str]] = set()
    for entry in read_contents(ddl).entries:
        schema = _shown(entry.schema)
        if entry.kind == TABLE:
            text = statements_of_entry(ddl, entry)
            if text.startswith("CREATE TABLE ") and (table := read_table(text)) is not None:
                tables[schema, _shown(entry.name)] = table
        elif entry.kind == CONSTRAINT:
            if key := KEY.search(text := statements_of_entry(ddl, entry)):
                # The statement is ALTER TABLE ONLY "schema"."table" ADD CONSTRAINT …
                table_of = NAME.findall(text)[:2]
                names = map(_unquoted, NAME.findall(key[1]))
                keys[_shown(_unquoted(table_of[0])), _shown(_unquoted(table_of[1]))] = frozenset(map(_shown, names))
        elif entry.kind == SEQUENCE and " UNLOGGED " not in statements_of_entry(ddl, entry).partition("(")[0]:
            sequences.add((schema, _shown(entry.name)))
    return Described(tables, keys, frozenset(sequences))


def contradictions(chain: Chain, shard: str, ddl: bytes) -> list[str]:
    """Return how the chain's last commit and the DDL of `shard` contradict each other, at most NAMED_MAX of each kind.

    Raises DumpFormatError if the DDL can't be read.
    """
    described, groups = describe(ddl), chain.groups(shard)
    found = [problem for group in groups for problem in _compare(group, described)][:NAMED_MAX]
    listed = {(group.schema, group.table) for group in groups}
    left_out = {out.name for out in chain.left_out if out.node == shard}
    named = ((table_name(*table), table) for table in sorted(described.tables.keys() - listed))
    unlisted = [name for name, _ in named if name not in left_out and is_included(name, chain.full.rules)]
    found += [f"the commit lists no rows of table {name}" for name in unlisted[:NAMED_MAX]]
    stored = {(sequence.schema, sequence.name) for sequence in chain.sequences(shard)}
    found += _missing("the commit has no value for sequence", described.sequences - stored, left_out)
    found += _missing("the DDL does not create sequence", stored - described.sequences, ())
    return found


def _missing(what: str, names: Iterable[tuple[str, str]], left_out: Collection[str]) -> Iterator[str]:
    texts = (table_name(*name) for name in sorted(names))
    yield from [f"{what} {text}" for text in texts if text not in left_out][:NAMED_MAX]


def _compare(group: Group, described: Described) -> Iterator[str]:
    table = described.tables.get((group.schema, group.table))
    if table is None:
        yield f"the DDL does not create table {group.name}"
        return
    ordered = sorted(group.columns, key=lambda column: column.number)
    names = {column.name for column in table.columns}
    # The statement of a table that inherits has only its own columns.
    compared = ordered if table.is_whole else [column for column in ordered if column.name in names]
    if [column.name for column in compared] != [column.name for column in table.columns]:
        yield (
            f"table {group.name} has columns {_listed(column.name for column in compared)} in the commit, but"
            f" {_listed(column.name for column in table.columns)} in the DDL"
        )
        return
    for column, other in zip(compared, table.columns, strict=True):
        if other.type and _plain(column) != other.type:
            yield (
                f"column {column.name} of table {group.name} has type {column.type} in the commit, but {other.type} in"
                " the DDL"
            )
    key = frozenset(column.name for column in group.columns[: group.key_width])
    if group.identity == "default" and key != described.keys.get((group.schema, group.table)):
        yield f"table {group.name} has key {_listed(sorted(key))} in the commit, but not in the DDL"


def _plain(column: Column) -> str:
    return column.type.replace('"', "")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names)


def read_table(text: str) -> DescribedTable | None:
    """Read a CREATE TABLE statement; None if it is a partitioned table, which has no rows of its own."""
    items, end = _split(text)
    rest = text[end:].partition(";")[0]
    if "\nPARTITION BY " in rest:
        return None
    is_whole = not INHERITING.search(rest) and not INHERITING.search(text[: text.index("(")] if "(" in text else text)
    columns: list[DescribedColumn] = []
    for item in items:
        name = NAME.match(item)
        if name is None:
            # A constraint of the table.
            continue
        after = item[name.end() :]
        word = next((match for match in AFTER_TYPE.finditer(after) if match["word"]), None)
        if word and word["word"] == "GENERATED" and "AS IDENTITY" not in after:
            continue
        type_ = after[: word.start()] if word else after
        if type_.startswith(" "):
            columns.append(DescribedColumn(_shown(_unquoted(name[1])), type_.strip().replace('"', "")))
    return DescribedTable(tuple(columns), is_whole)


def _split(text: str) -> tuple[list[str], int]:
    """Return the items of the first list in parentheses, and the offset behind it."""
    items: list[str] = []
    depth = begin = 0
    for match in PART.finditer(text):
        mark = match["mark"]
        if mark == "(":
            depth += 1
            begin = match.end() if depth == 1 else begin
        elif mark and depth == 1:
            items.append(text[begin : match.start()].strip())
            begin = match.end()
            if mark == ")":
                return items, match.end()
        if mark == ")":
            depth -= 1
    return items, len(text)


def _unquoted(name: str) -> str:
    return name.replace('""', '"')


def _shown(name: str) -> str:
    return raw_bytes(name).decode(errors="backslashreplace")
