"""What restores have left on their targets, whoever owns it: as long as there is any of one, it has not ended.

Only what belongs to our role or to a superuser is read (restore/targets/database_records.py). But nothing may be called
undone or done because another role's is not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutline.fleet.nodes.beside import FILLING, LOADING, is_beside
from cutline.fleet.nodes.connections import raising_unreachable
from cutline.restore.targets.database_records import list_databases
from cutline.restore.targets.databases import open_session
from cutline.restore.targets.target import Connections, Target, suffix_of

# Those of our role and of superusers are read, and may have come with a copy of another database.
SCHEMAS_QUERY = f"""
SELECT nspname FROM pg_namespace
 WHERE nspname ~ '^{FILLING}[0-9a-f]{{10}}$'
   AND nspowner NOT IN (SELECT oid FROM pg_roles WHERE rolsuper OR rolname = current_user)
"""


def find_remains(targets: Iterable[Target], connections: Connections) -> dict[str, str]:
    """What is left of restores that have not ended, as text by the suffix of their ids: databases and schemas.

    Raises NodeUnreachableError.
    """
    found: dict[str, str] = {}
    for target in targets:
        connection = connections[target.shard]
        for name, database in list_databases(connection).items():
            what = f"database {name} on {target.node.id}, which belongs to role {database.owner}"
            if is_beside(name, target.database, LOADING):
                found[name.rsplit("_", 1)[-1]] = what
            elif name == target.database and database.claim is not None:
                found[suffix_of(database.claim.operation)] = what
        session = open_session(target, connection)
        if session is None:
            continue
        with raising_unreachable(target.node), session:
            for (schema,) in session.execute(SCHEMAS_QUERY.encode()):
                where = f"database {target.database} on {target.node.id}"
                found[schema.removeprefix(FILLING)] = f"schema {schema} in {where}"
    return found
