"""Renaming what is part of other names: the generator replaces the old name wherever it keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tests.fuzz.maker import Maker
from tests.fuzz.names import quoted
from tests.fuzz.tables import Column
from tests.fuzz.values import Family


def rename_schema(maker: Maker) -> None:
    """Rename the schema that is not public, and keep track of everything in it."""
    old, new = maker.schemas[1], maker.name()
    maker.run(f"ALTER SCHEMA {quoted(old)} RENAME TO {quoted(new)}")
    maker.schemas[1] = new
    maker.tables[:] = [replace(one, schema=new) if one.schema == old else one for one in maker.tables]
    replace_everywhere(maker, f"{quoted(old)}.", f"{quoted(new)}.")


def replace_everywhere(maker: Maker, old: str, new: str) -> None:
    """Write `new` for `old` in every name and expression."""

    def text(found: str) -> str:
        return found.replace(old, new).replace(old.replace("'", "''"), new.replace("'", "''"))

    maker.families[:] = [_family(one, text) for one in maker.families]
    for place, table in enumerate(maker.tables):
        columns = tuple(_column(one, text) for one in table.columns)
        maker.tables[place] = replace(table, columns=columns, detached_from=text(table.detached_from))
    maker.labels = {text(name): labels for name, labels in maker.labels.items()}
    maker.composed = {text(name): fields for name, fields in maker.composed.items()}
    maker.domains = [text(name) for name in maker.domains]
    maker.sequences = [text(name) for name in maker.sequences]
    maker.objects = [(kind, text(name)) for kind, name in maker.objects]


def _family(family: Family, text: Callable[[str], str]) -> Family:
    return replace(family, type=text(family.type), edges=tuple(text(value) for value in family.edges))


def _column(column: Column, text: Callable[[str], str]) -> Column:
    pool = tuple(text(value) for value in column.pool)
    return replace(column, family=_family(column.family, text), pool=pool, more=text(column.more))
