"""Rehearse a restore's DDL in the empty database, so that refusals show up within seconds instead of after the load.

Whether a statement is refused depends on the server's version and extensions, on the restoring role, and on functions
that belong to the snapshot's owners, so the only way to know is to try. Afterwards the database is recreated. Some
refusals depend on the rows and appear only after the load. If there are thousands of tables with few rows, the load is
the shorter rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import psycopg

from cutline.fleet.messages import join_some
from cutline.nodes.problems import comment, read_role
from cutline.nodes.watch import Watch
from cutline.restore.ddl.database_ddl import OF_ROLE, SET_KIND
from cutline.restore.ddl.ddl import DATABASE, ROWS, Ddl, Refusal, SchemaLoadError
from cutline.restore.ddl.running import JOBS, NOT_GRANTED, DdlRun
from cutline.restore.estimates.estimate import ShardVolume
from cutline.restore.plan.database_plan import grant_settings
from cutline.restore.plan.report import describe_refusals
from cutline.restore.targets.requirements import WITHOUT
from cutline.restore.targets.target import Connections, Target, TargetUnfitError
from cutline.snapshots.ddl.ddl_archive import EXTENSION, PRIVILEGES

UNKNOWN_SYNTAX = psycopg.errors.SyntaxError.sqlstate
# pg_dump writes its statements for servers of its own version.
OWN_VERSION = (
    "a syntax error usually means that the snapshot's pg_dump is newer than the target: in the source's fleet.toml,"
    " set [tools] postgresql to programs of the servers' own version and take a new full snapshot, or restore into a"
    " newer"
    " PostgreSQL"
)
FORBIDDEN = psycopg.errors.InsufficientPrivilege.sqlstate
# Errors about what the server lacks (PostgreSQL manual, "PostgreSQL Error Codes"): objects, functions, tables, columns,
# schemas, databases, files of extensions, extensions and other features, and locales.
LACKING = ("42704", "42883", "42P01", "42703", "3F000", "3D000", "58P01", "0A000", "22023")
CREATE_LACKING = (
    "if the target's server lacks what the message names, such as a role or an extension, create or install it there;"
    " then repeat the command"
)
# Violated constraints of extensions' tables, and duplicate columns, objects, functions, schemas and tables.
CONFLICTING = ("23", "42701", "42710", "42723", "42P06", "42P07")
CREATED_BY_OTHERS = (
    "another version of an extension may create this row or object by itself: install the snapshot's version on the"
    " target's server, then repeat the command"
)
REMOVE_CAUSE = "remove the cause that the message names, then repeat the command"
# Such an extension refuses to be created in a database that gets the right name only at the end.
IN_ONE_DATABASE = (
    "an extension that its server allows in only one database, such as pg_cron, can be created only after the restored"
    " database has its real name: restore without it, then run the remaining statements"
)
# The privileges can't be granted in advance in a database that the restore creates.
ROWS_LATER = (
    "a superuser can add the rows of extension tables later: restore without them; then, in the file of refused"
    " statements, change the user in the \\connect lines to a superuser and run it"
)
NAMED_MAX = 5
# A rehearsal takes some 2 ms for each table, and loading so many stored bytes takes as long. Fewer tables take seconds.
MANY_TABLES, BYTES_PER_TABLE = 5_000, 32 << 10


def is_worthwhile(volume: ShardVolume) -> bool:
    """Whether a shard's DDL is to be rehearsed: loading its rows in vain would take longer."""
    return volume.tables < MANY_TABLES or volume.stored_bytes >= BYTES_PER_TABLE * volume.tables


def rehearse(target: Target, ddl: Ddl, watch: Watch, sessions_max: int = JOBS) -> list[Refusal]:
    """Run the DDL in the target's empty database, and return the refused statements.

    `sessions_max` is the maximum number of sessions that create indexes and keys concurrently. If our role is not a
    superuser, a grant that has no effect counts as refused. Raises NodeUnreachableError if the session is lost.
    """
    run = DdlRun(target.loaded, ddl, watch, is_strict=ddl.is_adapted, sessions_max=sessions_max)
    run.all_sections()
    return list(run.refusals.values())


def refuse(
    found: Mapping[Target, list[Refusal]], connections: Connections, steps: tuple[str, str] | None = None
) -> None:
    """Raise TargetUnfitError for statements that our role may not run, or SchemaLoadError for other refusals.

    `steps` are the commands for the same restore in two steps, if possible.
    """
    problems: list[str] = []
    refused: list[dict[str, object]] = []
    is_forbidden = has_rows = False
    instead: list[str] = []
    causing: list[str] = []
    grants: dict[str, list[str]] = {}
    for target, refusals in found.items():
        # Report only the causes: the other refusals follow from them.
        causes = [refusal for refusal in refusals if not refusal.needs]
        # List privileges last, because extensions may have many.
        causes.sort(key=lambda refusal: refusal.entry.kind == PRIVILEGES)
        forbidden = [cause for cause in causes if cause.sqlstate in (FORBIDDEN, *NOT_GRANTED)]
        if not causes:
            continue
        is_forbidden |= bool(forbidden)
        has_rows |= any(cause.entry.kind == ROWS for cause in causes)
        if any(cause.sqlstate == UNKNOWN_SYNTAX for cause in causes):
            instead.append(OWN_VERSION)
        if any(cause.entry.kind == EXTENSION for cause in causes):
            instead.append(IN_ONE_DATABASE)
        causing += [cause.sqlstate for cause in causes]
        role = read_role(target.node, connections[target.shard])
        who = f"role {role.name} may not restore this DDL" if forbidden else "the DDL was refused"
        for statement in grant_settings(role, connections[target.shard], _settings_of(forbidden)):
            grants.setdefault(statement, []).append(target.node.id)
        problems.append(
            f"node {target.node.id}: {who}: {join_some([refusal.text() for refusal in forbidden or causes], NAMED_MAX)}"
        )
        refused += [statement.document() for statement in describe_refusals(target, refusals)]
    if not problems:
        return
    what, details = f"{'; '.join(problems)}; no rows were loaded", dict[str, object](refused=refused)
    without = [f"or {WITHOUT}"]
    if any(refusal.section == DATABASE for refusals in found.values() for refusal in refusals):
        without.append("or restore without the databases' own properties: --no-database-settings")
    if is_forbidden:
        raise TargetUnfitError(
            what,
            hint=[
                "restore as a superuser, or grant the role the privileges that the statements need",
                *_script_of(grants),
                *([ROWS_LATER] if has_rows else []),
                *without,
            ],
            details=details,
        )
    if steps:
        without.append(
            f"or in steps: {steps[0]} --allow-refused-ddl; correct and run its file of refused statements;"
            f" then: {steps[1]}"
        )
    raise SchemaLoadError(
        what,
        hint=[
            *dict.fromkeys(map(remedy_of, causing)),
            *dict.fromkeys(instead),
            *without,
        ],
        details=details,
    )


def _settings_of(refusals: Iterable[Refusal]) -> list[tuple[str, str]]:
    """Return the databases' settings among the refused statements, as pairs of name and role ("" for all roles)."""
    parts = (refusal.entry.name.partition(OF_ROLE) for refusal in refusals if refusal.entry.kind == SET_KIND)
    return [(name, role) for name, _, role in parts]


def _script_of(grants: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield the statements, keyed in `grants` with their nodes, with a comment before those of the same nodes."""
    statements: dict[tuple[str, ...], list[str]] = {}
    for statement, nodes in grants.items():
        statements.setdefault(tuple(nodes), []).append(statement)
    for nodes, some in statements.items():
        yield comment(f"as a superuser on {', '.join(nodes)}; for the settings of the databases:")
        yield from some


def remedy_of(sqlstate: str) -> str:
    """Return what to do about a statement that the server refuses with this error although there are no rows."""
    if sqlstate in LACKING:
        return CREATE_LACKING
    return CREATED_BY_OTHERS if sqlstate.startswith(CONFLICTING) else REMOVE_CAUSE
