"""Find names in the statements of an archive that none of its entries creates.

- A view reads a relation that is not there.
- A constraint or an index is on a column that its table does not have, or a foreign key references such a table or
  column.
- A trigger calls a function that is not there.
- A function is written in a language that is not there.

An entry that depends on an extension is skipped: pg_dump lists what depends on a member of an extension as depending on
the extension (impossible_entries.py), and does not list the members. pg_dump dumps with an empty search_path, so it
qualifies all names except those of pg_catalog, and it quotes all names. Source: PostgreSQL's pg_dump.c and ruleutils.c.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

from msgspec import Struct, field

from cutline.snapshots.ddl.ddl_archive import EXTENSION, TABLE, ArchiveEntry, DdlArchive, statements_of_entry
from cutline.snapshots.ddl.impossible_entries import DOLLAR, RELATIONS, entry_label
from cutline.snapshots.ddl.quoted_names import QUOTED, Name, shown, shown_label, unquote
from cutline.snapshots.ddl.statement_lists import list_items, without_table_name

# Comments, literals and dollar quotes.
TEXT = rf"""--[^\n]*|[eE]'(?:[^'\\]|\\.)*'|'[^']*'|(?P<dollar>{DOLLAR}).*?(?P=dollar)"""
TEXT_OR_NAME = re.compile(rf"{TEXT}|{QUOTED}", re.DOTALL)
# Schemas of the server.
RESERVED, INFORMATION_SCHEMA = "pg_", "information_schema"
VIEWS = frozenset({"VIEW", "MATERIALIZED VIEW", "RULE"})
# The relation after FROM or JOIN, on lines of their own as pg_get_viewdef writes them. Other words FROM, as in
# EXTRACT (... FROM ...), follow on the same line. Names are replaced by numbers before. A function has a parenthesis
# after its name.
READ = re.compile(r'\n *(?:FROM|(?:(?:LEFT|RIGHT|FULL|CROSS) )?JOIN) \(*(?:ONLY )?"(\d+)"\."(\d+)"(?!\()')
# The columns in a list are quoted; PERIOD and WITHOUT OVERLAPS are words about the last one.
NAMES = r"(?:\"[^\"]*\"|[^()\"])*"
ADD = rf"\s*ALTER (?:FOREIGN )?TABLE (?:ONLY )?({QUOTED})\.({QUOTED})\s+ADD CONSTRAINT {QUOTED}"
KEY = re.compile(
    rf"{ADD} (?:PRIMARY KEY|UNIQUE(?: NULLS NOT DISTINCT)?) \((?P<columns>{NAMES})\)(?: INCLUDE \((?P<more>{NAMES})\))?"
)
FOREIGN_KEY = re.compile(
    rf"{ADD} FOREIGN KEY \((?P<columns>{NAMES})\) REFERENCES ({QUOTED})\.({QUOTED})\((?P<referenced>{NAMES})\)"
)
INDEX = re.compile(rf"\s*CREATE (?:UNIQUE )?INDEX {QUOTED} ON (?:ONLY )?({QUOTED})\.({QUOTED}) USING {QUOTED} \(")
# An item of an index that is a column, and not a function of it.
COLUMN = re.compile(rf"({QUOTED})(?![.(\"])")
CALLS = re.compile(
    rf"{TEXT}|{QUOTED}|\sEXECUTE (?:FUNCTION|PROCEDURE) (?P<schema>{QUOTED})\.(?P<name>{QUOTED})\(", re.DOTALL
)
LANGUAGE = re.compile(rf"{TEXT}|{QUOTED}|\sLANGUAGE (?P<name>{QUOTED})", re.DOTALL)
# A procedural language, from a version of PostgreSQL without extensions.
LANGUAGES, OWN_LANGUAGE = frozenset({"internal", "c", "sql", "plpgsql"}), "PROCEDURAL LANGUAGE"
# Tables of these kinds have columns that their statements do not list.
WITH_OTHER_COLUMNS = re.compile(rf"{TEXT}|{QUOTED}|(?P<kind>\sINHERITS \(|\sOF \"|\sPARTITION OF )", re.DOTALL)
TABLES = frozenset({TABLE, "FOREIGN TABLE"})
ROUTINES = frozenset({"FUNCTION", "PROCEDURE"})


def unknown_names(archive: DdlArchive) -> Iterator[str]:
    """Yield in words which statements of the archive name something that it does not create."""
    known = _Created.of(archive)
    for entry in archive.contents.entries:
        if known.extensions.intersection(entry.dependencies):
            continue
        text = statements_of_entry(archive.body, entry)
        if entry.kind in VIEWS:
            yield from _unknown_relations(entry, text, known.relations)
        elif entry.kind in ("CONSTRAINT", "FK CONSTRAINT", "INDEX"):
            yield from _unknown_columns(entry, text, known)
        elif entry.kind == "TRIGGER":
            for call in CALLS.finditer(text):
                if call["name"] and (called := _name(call["schema"], call["name"])) not in known.functions:
                    yield f"{entry_label(entry)} calls {shown_label(called)}, which the DDL does not create"
        elif entry.kind in ROUTINES:
            named = next((match["name"] for match in LANGUAGE.finditer(text) if match["name"]), None)
            if named is not None and (language := unquote(named)) not in known.languages:
                yield f"{entry_label(entry)} is written in {shown(language)}, a language that the DDL does not create"


class _Created(Struct):
    """What the entries of an archive create.

    `columns` are those of tables whose statements list all of them. `extensions` are numbers of entries.
    """

    extensions: set[int] = field(default_factory=set)
    relations: set[Name] = field(default_factory=set)
    columns: dict[Name, frozenset[str]] = field(default_factory=dict)
    functions: set[Name] = field(default_factory=set)
    languages: set[str] = field(default_factory=lambda: set(LANGUAGES))

    @classmethod
    def of(cls, archive: DdlArchive) -> _Created:
        found = cls()
        for entry in archive.contents.entries:
            if entry.kind == EXTENSION:
                found.extensions.add(entry.number)
            elif entry.kind == OWN_LANGUAGE:
                found.languages.add(entry.name)
            elif entry.kind in ROUTINES:
                # The name of the entry has the types of the arguments. A name may contain a parenthesis itself.
                begins = [place for place, letter in enumerate(entry.name) if letter == "("]
                found.functions |= {(entry.schema, entry.name[:place]) for place in begins}
            if entry.kind in RELATIONS:
                found.relations.add((entry.schema, entry.name))
            if entry.kind in TABLES:
                columns = _columns_of(statements_of_entry(archive.body, entry))
                if columns is not None:
                    found.columns[entry.schema, entry.name] = columns
        return found


def _columns_of(text: str) -> frozenset[str] | None:
    """Return the columns that a CREATE TABLE lists; None if the table has others."""
    return _columns_of_nameless(without_table_name(text))


# Most statements are the same in every DDL of a chain.
@lru_cache(maxsize=1 << 15)
def _columns_of_nameless(text: str) -> frozenset[str] | None:
    if any(match["kind"] for match in WITH_OTHER_COLUMNS.finditer(text)):
        return None
    return frozenset(unquote(match[1]) for item in list_items(text) if (match := COLUMN.match(item)))


class _Uses(NamedTuple):
    """A table, and the columns of it that a statement names."""

    table: Name
    columns: tuple[str, ...]


@lru_cache(maxsize=1 << 15)
def _uses_of(kind: str, text: str) -> tuple[_Uses, ...]:
    """Return the tables, with their columns, that a constraint or an index names."""
    if kind == "INDEX" and (found := INDEX.match(text)):
        items = (COLUMN.match(item) for item in list_items(text[found.end() - 1 :]))
        return (_Uses(_name(found[1], found[2]), tuple(unquote(item[1]) for item in items if item)),)
    if kind == "CONSTRAINT" and (found := KEY.match(text)):
        return (_Uses(_name(found[1], found[2]), _names(found["columns"]) + _names(found["more"] or "")),)
    if kind == "FK CONSTRAINT" and (found := FOREIGN_KEY.match(text)):
        own = _Uses(_name(found[1], found[2]), _names(found["columns"]))
        return own, _Uses(_name(found[4], found[5]), _names(found["referenced"]))
    return ()


def _unknown_columns(entry: ArchiveEntry, text: str, known: _Created) -> Iterator[str]:
    for table, columns in _uses_of(entry.kind, text):
        if table not in known.relations:
            yield f"{entry_label(entry)} names {shown_label(table)}, which the DDL does not create"
        elif table in known.columns:
            for column in columns:
                if column not in known.columns[table]:
                    yield f"{entry_label(entry)} names column {shown(column)}, which {shown_label(table)} does not have"


def _unknown_relations(entry: ArchiveEntry, text: str, relations: Collection[Name]) -> Iterator[str]:
    """Yield which relations a view reads although the archive does not create them."""
    names: list[str] = []

    def numbered(match: re.Match[str]) -> str:
        if not match[0].startswith('"'):
            return "''"
        names.append(match[0])
        return f'"{len(names) - 1}"'

    for schema, name in READ.findall(TEXT_OR_NAME.sub(numbered, text)):
        read = _name(names[int(schema)], names[int(name)])
        if read not in relations and not read[0].startswith(RESERVED) and read[0] != INFORMATION_SCHEMA:
            yield f"{entry_label(entry)} reads {shown_label(read)}, which the DDL does not create"


def _names(text: str) -> tuple[str, ...]:
    return tuple(unquote(name) for name in re.findall(QUOTED, text))


def _name(schema: str, name: str) -> Name:
    return unquote(schema), unquote(name)
