"""Tables whose indexes or statistics call functions that are not PostgreSQL's own.

The planner evaluates parts of such expressions for every query that reads the table, as the role of the session, even
if the query does not use the index. So a query would run the owner's code as our role, and fail if the code names other
functions without a schema. COPY of a whole table is not planned.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import psycopg

# Objects with lower numbers come with the server (transam.h, FirstNormalObjectId).
CODE_QUERY = """
WITH parts (relid, classid, objid) AS (
    SELECT indrelid, 'pg_class'::regclass, indexrelid FROM pg_index WHERE indrelid = ANY (%(tables)s::oid[])
    UNION ALL
    SELECT stxrelid, 'pg_statistic_ext'::regclass, oid FROM pg_statistic_ext WHERE stxrelid = ANY (%(tables)s::oid[]))
SELECT DISTINCT p.relid::bigint
  FROM parts p JOIN pg_depend d ON d.classid = p.classid AND d.objid = p.objid
 WHERE d.refclassid IN ('pg_proc'::regclass, 'pg_operator'::regclass) AND d.refobjid >= 16384
"""


def find_planned_code(connection: psycopg.Connection[Any], oids: Collection[int]) -> frozenset[int]:
    """Those of the tables, by oid, whose indexes or statistics call functions or operators of somebody's own."""
    if not oids:
        return frozenset()
    return frozenset(oid for (oid,) in connection.execute(CODE_QUERY, {"tables": list(oids)}))
