"""What a superuser of the targets' servers does for a restore by a role that is none.

It creates the roles that the snapshot names and the extensions, in databases that are empty: nothing of the source has
run there, and no session of a superuser enters a database from then on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect_with_path, disrupted_error, raising_unreachable, with_database
from cutline.fleet.nodes.disruptions import remedy_of
from cutline.fleet.nodes.encodings import RAW, raw_bytes
from cutline.fleet.nodes.server_messages import shorten_message
from cutline.restore.ddl.beforehand import CREATES
from cutline.restore.ddl.ddl import Ddl, shorten_statement
from cutline.restore.ddl.running import reset_settings
from cutline.restore.obstacles.obstacles import TargetLacksError
from cutline.restore.obstacles.server import WITHOUT
from cutline.restore.targets.target import Target
from cutline.snapshots.ddl.search_path import DEFAULT

# Scripts of extensions ask for the search_path with which their session began, and may set another one.
SET_PATH = "SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)"

# The comment on roles that a drill has made, and the name of the one that restored, which is drawn.
MARK = re.compile(r"cutline_drill_[0-9a-f]{10}")
# A comment alone could be anybody's: the role is the one that restored, or has that one as a member. It comes last.
MARKED_QUERY = f"""
WITH marked AS (
  SELECT oid, rolname, shobj_description(oid, 'pg_authid') AS mark FROM pg_roles
   WHERE shobj_description(oid, 'pg_authid') ~ '^{MARK.pattern}$' AND NOT rolsuper
)
SELECT rolname, mark FROM marked AS one
 WHERE rolname = mark
    OR EXISTS (SELECT FROM pg_auth_members m JOIN marked login ON login.oid = m.member
                WHERE m.roleid = one.oid AND login.rolname = one.mark AND login.mark = one.mark)
 ORDER BY rolname = mark, rolname
"""


def find_marked(connection: psycopg.Connection[Any]) -> list[tuple[str, str]]:
    """The roles of the server that superusers' drills have made, each with its drill's mark, the login role last."""
    return [(role, mark) for role, mark in connection.execute(MARKED_QUERY)]


def mark_role(connection: psycopg.Connection[Any], role: str, mark: str) -> None:
    """Say in a comment on a role who has made it."""
    statement = sql.SQL("COMMENT ON ROLE {} IS {}")
    connection.execute(statement.format(sql.Identifier(role), sql.Literal(mark)))


@dataclass(frozen=True, slots=True)
class Superusers:
    """A superuser's sessions on each target's server, by shard; `role` is the one that restores.

    `extensions` are those that it may create beside the trusted ones. `data_directories` are by shard, too, None if
    they are not known: the role may not see where they are. `mark` is a comment on the roles that are made, `install`
    what to do where extensions are lacking.
    """

    nodes: Mapping[str, Node]
    role: str
    extensions: frozenset[str]
    data_directories: Mapping[str, Path | None]
    mark: str = ""
    install: str = ""

    def node_of(self, target: Target) -> Node:
        """The database being restored, as a superuser enters it: only as long as it is empty."""
        return with_database(self.nodes[target.shard], target.loading)

    def run_beforehand(self, target: Target, ddl: Ddl, *, allows_refused: bool) -> None:
        """Run the statements that the DDL needs in the empty database; raise TargetLacksError if one is refused.

        If it `allows_refused`, an extension may be: the DDL has it, too.
        """
        if not ddl.beforehand:
            return
        node = self.node_of(target)
        with raising_unreachable(node), connect_with_path(node, DEFAULT, client_encoding=RAW) as connection:
            for statement in ddl.beforehand:
                try:
                    connection.execute(SET_PATH)
                    connection.execute(raw_bytes(statement))
                except psycopg.Error as error:
                    if connection.broken:
                        raise
                    if remedy_of(error):
                        raise disrupted_error(
                            target.node.id, error, shorten_statement(statement).rstrip(";")
                        ) from error
                    if allows_refused and statement.startswith(CREATES):
                        continue
                    raise TargetLacksError(
                        f"node {target.node.id}: {shorten_statement(statement)} {shorten_message(error)}",
                        hint=[WITHOUT, "or restore to servers that can create it"],
                        details={"node": target.node.id},
                    ) from error
            reset_settings(connection, node)
