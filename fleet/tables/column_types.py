"""What types columns are made of, however deep: what can't be loaded again, and what not every server reads.

A domain, an array, a composite or a range has the values of other types in it, and can be read back where they can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg

XML = "xml"
# Types that PostgreSQL or an extension may have for itself alone: those of the category that the manual calls
# "internal-use" ("char" is one, for its size), and those that an operator class stores and none takes as a column's.
OWN_QUERY = """
SELECT t.oid FROM pg_type t WHERE t.typtype = 'b' AND t.typcategory = 'Z' AND t.oid <> '"char"'::regtype
UNION
SELECT o.opckeytype FROM pg_opclass o
 WHERE o.opckeytype <> 0 AND NOT EXISTS (SELECT FROM pg_opclass i WHERE i.opcintype = o.opckeytype)
"""
# SQL: the types that have a part in those of `u`, one level deeper. Below 16384 are PostgreSQL's own, of which only
# arrays hold others.
WITHIN = """JOIN pg_type t ON t.oid = u.typid
     CROSS JOIN LATERAL (
           SELECT t.typelem WHERE t.typelem <> 0
           UNION ALL SELECT t.typbasetype WHERE t.typbasetype <> 0
           UNION ALL SELECT r.rngsubtype FROM pg_range r WHERE t.oid IN (r.rngtypid, r.rngmultitypid)
           UNION ALL SELECT a.atttypid FROM pg_attribute a
                      WHERE a.attrelid = t.typrelid AND t.typrelid <> 0 AND a.attnum > 0 AND NOT a.attisdropped
           ) part (oid)
     WHERE u.typid >= 16384 OR t.typcategory = 'A'"""
# Types are followed once for all columns of theirs.
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
told (oid) AS (SELECT 'xml'::regtype::oid UNION {OWN_QUERY})
SELECT c.attrelid::bigint, c.attnum, c.attname, told.oid::regtype::text
  FROM columns c JOIN contained u ON u.root = c.atttypid JOIN told ON told.oid = u.typid
 ORDER BY 1, 2, 4
"""


@dataclass(frozen=True, slots=True)
class Contained:
    """What is told of one table's stored columns.

    `unloadable` are those whose values PostgreSQL prints and does not read back, by name, with the type in question;
    `xml` are the numbers of those that have XML in them, which only a server that is built with libxml reads.
    """

    unloadable: tuple[tuple[str, str], ...] = ()
    xml: tuple[int, ...] = ()


NOTHING_TOLD = Contained()


def read_contained(connection: psycopg.Connection[Any], oids: Sequence[int]) -> dict[int, Contained]:
    """What is told of the tables of these oids, of those of which there is anything to tell."""
    rows = connection.execute(COLUMNS_QUERY, (list(oids),)).fetchall()
    refusing = {name for name in {row[3] for row in rows} - {XML} if not _reads(connection, name)}
    found: dict[int, Contained] = {}
    for oid, number, column, type_ in rows:
        one = found.get(oid, NOTHING_TOLD)
        if type_ == XML:
            found[oid] = Contained(one.unloadable, (*one.xml, number))
        elif type_ in refusing:
            found[oid] = Contained((*one.unloadable, (column, type_)), one.xml)
    return found


def _reads(connection: psycopg.Connection[Any], name: str) -> bool:
    """Whether the type's input function reads anything at all."""
    try:
        with connection.transaction():
            connection.execute(f"SELECT ''::{name}".encode())
    except (psycopg.NotSupportedError, psycopg.InternalError):
        # Before 16 those of some extensions say so by the second one.
        return False
    except (psycopg.DataError, psycopg.ProgrammingError):
        pass  # this text is none of its values
    return True
