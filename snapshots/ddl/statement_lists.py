"""Divide a list in parentheses in a statement of pg_dump into its items, such as the columns of CREATE TABLE."""

from __future__ import annotations

import re

from msgspec import Struct

# A doubled quote is read as two adjacent strings. The server writes no quote after a backslash.
STRING = r"""[eE]?'[^']*'|"[^"]*"|--[^\n]*"""
PART = re.compile(rf"{STRING}|(?P<mark>[(),])")
# A partitioned table has no rows of its own. Tables of the other two kinds have columns that their statements omit.
KIND = re.compile(rf"{STRING}|\s(?P<word>PARTITION BY|INHERITS|OF) ")

NAMED_TABLE = re.compile(r'CREATE (?:[A-Z]+ )?TABLE "(?:[^"]|"")*"\."(?:[^"]|"")*"')


class ItemList(Struct, frozen=True):
    """The items of a list in parentheses, and its offsets in the statement."""

    items: list[str]
    begin: int
    end: int


def split_list(text: str) -> ItemList:
    """Return the first list in parentheses; one without items, at the end, if there is none.

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
                    return ItemList([], first, first)
        elif mark and depth == 1:
            items.append(text[begin : match.start()].strip())
            begin = match.end()
            if mark == ")":
                return ItemList(items, first, match.end())
        if mark == ")":
            depth -= 1
    return ItemList([], len(text), len(text))


def without_table_name(text: str) -> str:
    """Return what follows the name in a CREATE TABLE statement.

    In a database with a schema for each tenant, this is the same for many tables, so it is the key of caches.
    """
    named = NAMED_TABLE.match(text)
    return text[named.end() :] if named else text


def list_items(text: str) -> list[str]:
    """Return the items of the first list in parentheses, such as the columns and constraints of CREATE TABLE."""
    return split_list(text).items
