"""Where a drill restores, and what its servers lack."""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from psycopg import sql

from cutline.fleet.config import Node
from cutline.fleet.nodes.connections import connect
from cutline.restore.ddl.ddl import SchemaLoadError
from cutline.restore.drill.assertions import Reader
from cutline.restore.obstacles.obstacles import ObstaclesError, TargetLacksError
from cutline.restore.obstacles.server import DRILL_WITHOUT
from cutline.restore.plan import RestorePlan
from cutline.restore.targets.superusers import mark_role
from cutline.restore.targets.target import Target, TargetUnfitError
from cutline.storage.errors import RefusedError, remember_secret

# Contrib modules that are not marked as trusted; to a role without privileges they give no file, program or connection.
CONTRIB = frozenset({
    "amcheck", "autoinc", "bloom", "earthdistance", "insert_username", "intagg", "moddatetime", "pageinspect",
    "pg_buffercache", "pg_freespacemap", "pg_prewarm", "pg_stat_statements", "pg_surgery", "pg_visibility",
    "pg_walinspect", "pgrowlocks", "pgstattuple", "sslinfo",
})  # fmt: skip
TERMINATE = "SELECT pg_terminate_backend(%s, %s)"
END_SECONDS_MAX = 10
PASSWORD_BYTES = 32
# In the hints of a restore, what helps a drill too.
DRILLS = re.compile(r"\[drill\]|^(?!.*--schema-only).*--allow-refused-ddl")


class DrillUnfitError(RefusedError):
    """The servers of a drill can't hold the snapshot's databases."""


@dataclass(frozen=True, slots=True)
class DrillPlace:
    """Where a drill restores: the plan into its servers; `make_reader` lets somebody ask what a target has then."""

    plan: RestorePlan
    make_reader: Callable[[Target], Reader]


def new_password() -> str:
    """A password that no error shows."""
    password = secrets.token_hex(PASSWORD_BYTES)
    remember_secret(password)
    return password


def create_login(superuser: Node, role: str, password: str, attributes: str, *, mark: str = "") -> None:
    """Create a role that can log in, and `mark` it in the same transaction; the server's log has no password."""
    with connect(superuser) as connection, connection.transaction():
        verifier = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256")
        statement = sql.SQL("CREATE ROLE {} LOGIN PASSWORD {} ").format(
            sql.Identifier(role), sql.Literal(verifier.decode())
        )
        connection.execute(statement + sql.SQL(attributes))
        if mark:
            mark_role(connection, role, mark)


def end_session(node: Node, process: int) -> bool:
    """End the session with this process id; return whether it has ended in time."""
    with connect(node) as connection:
        return connection.execute(TERMINATE, (process, END_SECONDS_MAX * 1000)).fetchone() == (True,)


@contextmanager
def naming_unfit(snapshot: str) -> Iterator[None]:
    """Raise DrillUnfitError if a restore in the block is refused for what the servers made for it are or lack."""
    try:
        yield
    except (TargetUnfitError, TargetLacksError, SchemaLoadError, ObstaclesError) as error:
        # What others say is about servers that somebody keeps, or steps that a drill does not have.
        hints = [line for line in error.hint.splitlines() if DRILLS.search(line)]
        obstacles: Any = error.details.get("obstacles", [{"hint": error.hint}])
        if any(one["hint"] != DRILL_WITHOUT for one in obstacles):
            hints.append(f"or drill on servers of your own: snapshot restore {shlex.quote(snapshot)} --drill --to FILE")
        hints[0] = hints[0].removeprefix("or ")
        raise DrillUnfitError(
            f"the servers of a drill can't hold the snapshot: {error.message}",
            hint=list(dict.fromkeys(hints)),
            details=error.details,
        ) from error
