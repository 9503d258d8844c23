"""Find the tables that are not what they were, without reading the definitions of all others.

The server computes a digest for each table, over everything that its definition (Group) and its state (TableState) are
read from, and compares it with the digest of the table as it was. So only tables whose digests differ are read again:
the names of the table and its schema, its columns (the attribute number and the xmin of each row in pg_attribute), its
replica identity and key, its file, its membership in Cutline's publications, and whether our role may read it.

Types are stored elsewhere in the catalogs. Built-in types don't change, except for the names that some of them print;
tables with columns of these are always read again. Of tables with other types, what the values contain and how they
are printed is compared, and of all columns the names of their types.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import psycopg
from msgspec import Struct

from cutline.fleet.table_names import table_name
from cutline.nodes.encodings import UTF8, digest_of, encoding_of
from cutline.nodes.groups import NO_SPECIAL_COLUMNS, ORDINARY_TABLE, Column, Group, list_names, read_special_columns
from cutline.nodes.publications import publication_names
from cutline.nodes.table_state import TableState, read_printed

DIGEST_DIGITS = 32
# The letters of pg_class.relreplident; "-" stands for every identity that can't be published.
IDENTITIES = {"default": "d", "index": "i", "full": "f", "append_only": "-"}
# As `_line` writes it in Python. The key is that of COLUMNS_QUERY, and an identity with generated columns is as in
# TABLES_QUERY (nodes/groups.py).
LINE = """
format('%%s %%s %%s %%s %%s|%%s|%%s|%%s %%s%%s', c.relnatts, file.node, identity.letter, may.read, identity.key,
       (SELECT string_agg(format('%%s.%%s', a.attnum, a.xmin), ' ' ORDER BY a.attnum)
          FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       m.stamps, char_length(n.nspname::text), n.nspname, c.relname)
"""
LINES_QUERY = f"""
WITH generated AS MATERIALIZED (
    SELECT DISTINCT attrelid FROM pg_attribute WHERE attgenerated <> '' AND NOT attisdropped),
members AS MATERIALIZED (
    SELECT r.prrelid, p.pubname = %(append_only)s AS is_append_only,
           format('%%s.%%s %%s.%%s', p.oid, p.xmin, r.oid, r.xmin) AS stamps
      FROM pg_publication p JOIN pg_publication_rel r ON r.prpubid = p.oid
     WHERE p.pubname IN (%(keyed)s, %(append_only)s)),
now AS (
    SELECT c.oid, n.nspname, c.relname, left({digest_of(LINE.strip())}, {DIGEST_DIGITS}) AS digest
      FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
     CROSS JOIN (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) AS ours
      LEFT JOIN pg_index i ON i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
           AND ((c.relreplident = 'd' AND i.indisprimary) OR (c.relreplident = 'i' AND i.indisreplident))
     CROSS JOIN LATERAL (
           SELECT c.oid IN (SELECT attrelid FROM generated)
                  AND (c.relreplident = 'f' OR EXISTS (
                       SELECT FROM pg_attribute a
                         JOIN pg_index g ON g.indrelid = c.oid AND (
                              (c.relreplident = 'd' AND g.indisprimary) OR (c.relreplident = 'i' AND g.indisreplident))
                        WHERE a.attrelid = c.oid AND a.attgenerated <> '' AND NOT a.attisdropped
                          AND a.attnum = ANY (g.indkey[0:g.indnkeyatts - 1])))) AS of_generated (is_so)
     CROSS JOIN LATERAL (
           SELECT CASE WHEN is_so OR (i.indrelid IS NULL AND c.relreplident <> 'f') THEN '-'
                       ELSE c.relreplident::text END,
                  CASE WHEN NOT is_so AND i.indrelid IS NOT NULL
                       THEN (SELECT string_agg(k.attnum::text, ' ' ORDER BY k.attnum)
                               FROM unnest(i.indkey[0:i.indnkeyatts - 1]) AS k (attnum)) END
           ) AS identity (letter, key)
      LEFT JOIN members m ON m.prrelid = c.oid AND m.is_append_only = (identity.letter = '-')
     CROSS JOIN LATERAL (SELECT CASE WHEN c.relfilenode <> 0 THEN c.relfilenode::bigint
                                     ELSE pg_relation_filenode(c.oid)::bigint END) AS file (node)
     CROSS JOIN LATERAL (SELECT rolsuper OR coalesce(has_table_privilege(c.oid, 'SELECT'), true)
                                            AND NOT row_security_active(c.oid)) AS may (read)
     WHERE {ORDINARY_TABLE})
SELECT now.oid::bigint, k.oid::bigint, now.nspname, now.relname
  FROM now FULL JOIN unnest(%(oids)s::oid[], %(digests)s::text[]) AS k (oid, digest) ON k.oid = now.oid
 WHERE now.digest IS DISTINCT FROM k.digest
"""
# The tables with columns of types that are not built in.
TYPED_QUERY = """
SELECT DISTINCT a.attrelid::bigint FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 WHERE a.atttypid >= 16384 AND a.attnum > 0 AND NOT a.attisdropped AND c.relkind = 'r' AND c.relpersistence = 'p'
"""
TYPE_NAMES_QUERY = """
SELECT format_type(t.oid, t.modifier) FROM unnest(%s::oid[], %s::int[]) WITH ORDINALITY AS t (oid, modifier, n)
 ORDER BY n
"""


class ChangedTables(Struct, frozen=True):
    """The oids of tables that must be read again, and of those that are gone; `others` were not known, by oid."""

    changed: frozenset[int]
    gone: frozenset[int]
    others: Mapping[int, str]


class _NamedType(NamedTuple):
    """A column's type, its modifier, and the name of both together."""

    oid: int
    modifier: int
    name: str


def find_changed(
    connection: psycopg.Connection[Any], fleet_id: str, groups: Sequence[Group], states: Mapping[str, TableState]
) -> ChangedTables | None:
    """Compare tables with their earlier `states`, by name of the `groups`; return None if that is not possible.

    A table that is not `changed` has the same definition and the same state, except for counters; its type stamps are
    the same, too. Run this in a transaction with a single snapshot.
    """
    if encoding_of(connection) != UTF8:
        # The digests contain names.
        return None
    tables = [(group, states[name]) for group, name in zip(groups, list_names(groups), strict=True)]
    keyed, append_only = publication_names(fleet_id)
    known = {
        "keyed": keyed,
        "append_only": append_only,
        # Texts: psycopg takes ten times as long for a list.
        "oids": f"{{{','.join([str(state.oid) for _, state in tables])}}}",
        "digests": f"{{{','.join(_digests(tables))}}}",
    }
    changed: set[int] = set()
    gone: set[int] = set()
    others: dict[int, str] = {}
    for oid, known_oid, schema, name in connection.execute(LINES_QUERY, known):
        if oid is None:
            gone.add(known_oid)
        elif known_oid is None:
            others[oid] = table_name(schema, name)
        else:
            changed.add(oid)
    renamed = _find_renamed_types(connection, groups)
    changed.update(
        state.oid
        for group, state in tables
        if (state.types and state.has_names) or (renamed and not renamed.isdisjoint(_types(group.columns)))
    )
    changed |= _find_typed(connection, {state.oid: state for _, state in tables}, changed | gone)
    return ChangedTables(frozenset(changed - gone), frozenset(gone), others)


def _digests(tables: Iterable[tuple[Group, TableState]]) -> Iterator[str]:
    # With a schema for each tenant, thousands of tables share their columns.
    keys: dict[tuple[int, int], str] = {}
    for group, state in tables:
        place = id(group.columns), group.key_width
        if (key := keys.get(place)) is None:
            key = keys[place] = " ".join(str(column.number) for column in group.columns[: group.key_width])
        yield hashlib.sha256(_line(group, state, key).encode()).hexdigest()[:DIGEST_DIGITS]


def _line(group: Group, state: TableState, key: str) -> str:
    members = f"{state.publication} {state.membership}" if state.membership else ""
    return (
        f"{state.attributes} {state.file} {IDENTITIES.get(group.identity)} t {key}|{state.columns}|{members}"
        f"|{len(group.schema)} {group.schema}{group.table}"
    )


def _types(columns: Iterable[Column]) -> Iterator[_NamedType]:
    return (_NamedType(column.type_oid, column.type_modifier, column.type) for column in columns)


def _find_renamed_types(connection: psycopg.Connection[Any], groups: Iterable[Group]) -> set[_NamedType]:
    """Return the types of columns, with their modifiers and names, that have other names now."""
    columns = {id(group.columns): group.columns for group in groups}
    types = list({one for some in columns.values() for one in _types(some)})
    names = connection.execute(
        TYPE_NAMES_QUERY, ([one.oid for one in types], [one.modifier for one in types])
    ).fetchall()
    return {one for one, (name,) in zip(types, names, strict=True) if one.name != name}


def _find_typed(connection: psycopg.Connection[Any], states: Mapping[int, TableState], found: set[int]) -> set[int]:
    """Return the tables whose types contain other types, or print their values differently, than they did."""
    oids = [oid for (oid,) in connection.execute(TYPED_QUERY) if oid in states and oid not in found]
    if not oids:
        return set()
    printed, special = read_printed(connection, oids), read_special_columns(connection, oids)
    changed: set[int] = set()
    for oid in oids:
        state, columns = states[oid], special.get(oid, NO_SPECIAL_COLUMNS)
        is_same = printed[oid] == state.printed and frozenset(columns.xml) == state.xml_columns
        if not is_same or columns.unloadable:
            changed.add(oid)
    return changed
