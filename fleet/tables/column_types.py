"""Find columns whose types, at any depth, can't be loaded again or can't be read by every server.

A domain, array, composite or range contains values of other types, and can be loaded only where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

XML = "xml"
# Types that may be internal to PostgreSQL or an extension: those of the category that the manual calls "internal-use"
# (which includes "char", a usable type), and those that an operator class stores but none accepts as a column's type.
OWN_QUERY = """
SELECT t.oid FROM pg_type t WHERE t.typtype = 'b' AND t.typcategory = 'Z' AND t.oid <> '"char"'::regtype
UNION
SELECT o.opckeytype FROM pg_opclass o
 WHERE o.opckeytype <> 0 AND NOT EXISTS (SELECT FROM pg_opclass i WHERE i.opcintype = o.opckeytype)
"""
# SQL: the types contained in those of `u`, one level deeper. Oids below 16384 are built-in types, of which only arrays
# contain others.
WITHIN = """JOIN pg_type t ON t.oid = u.typid
     CROSS JOIN LATERAL (
           SELECT t.typelem WHERE t.typelem <> 0
           UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
           UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
           UNION ALL SELECT a.atttypid FROM pg_attribute a
                      WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped
           ) part (oid)
     WHERE u.typid >= 16384 OR t.typcategory = 'A'"""
# Each type is expanded once, for all its columns.
COLUMNS_QUERY = f"""
WITH RECURSIVE columns AS (
    SELECT a.attrelid, a.attnum, a.attname, a.atttypid FROM pg_attribute a
     WHERE a.attrelid = ANY (%s) AND a.attnum > 0 AND NOT a.attisdropped AND a.attgenerated = ''),
contained (root, typid) AS (
    SELECT DISTINCT c.atttypid, c.atttypid FROM columns c
    UNION
    SELECT u.root, part.oid
      FROM contained u {WITHIN}
),
special (oid) AS (SELECT 'xml'::regtype::oid UNION {OWN_QUERY})
SELECT c.attrelid::bigint, c.attnum, c.attname, special.oid::regtype::text
  FROM columns c JOIN contained u ON u.root = c.atttypid JOIN special ON special.oid = u.typid
 ORDER BY 1, 2, 4
"""


@dataclass(frozen=True, slots=True)
class SpecialColumns:
    """The stored columns of one table that need attention.

    `unloadable`: columns whose values PostgreSQL prints but can't read back, as (column, type at fault). `xml`: the
    numbers of columns that contain XML, which only a server built with libxml can read.
    """

    unloadable: tuple[tuple[str, str], ...] = ()
    xml: tuple[int, ...] = ()


NO_SPECIAL_COLUMNS = SpecialColumns()


def read_special_columns(connection: psycopg.Connection[Any], oids: Sequence[int]) -> dict[int, SpecialColumns]:
    """The special columns of the tables that have any, by the table's oid."""
    rows = connection.execute(COLUMNS_QUERY, (list(oids),)).fetchall()
    refusing = {name for name in {row[3] for row in rows} - {XML} if not _has_input(connection, name)}
    by_table: dict[int, SpecialColumns] = {}
    for oid, number, column, type_ in rows:
        one = by_table.get(oid, NO_SPECIAL_COLUMNS)
        if type_ == XML:
            by_table[oid] = SpecialColumns(one.unloadable, (*one.xml, number))
        elif type_ in refusing:
            by_table[oid] = SpecialColumns((*one.unloadable, (column, type_)), one.xml)
    return by_table


def _has_input(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether the type's input function accepts any value at all."""
    try:
        with connection.transaction():
            connection.execute(f"SELECT ''::{name}".encode())
    except (psycopg.NotSupportedError, psycopg.InternalError):
        # Some extensions' input functions raise the second error before 16.
        return False
    except (psycopg.DataError, psycopg.ProgrammingError):
        pass  # it reads values, but not this one
    return True
