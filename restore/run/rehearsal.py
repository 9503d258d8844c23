"""Rehearse a restore's DDL in the empty database, so that refusals show up within seconds instead of after the load.

Whether a statement is refused depends on the server's version and extensions, on the restoring role, and on functions
that belong to the snapshot's owners, so the only way to know is to try. Afterwards the database is recreated. Some
refusals depend on the rows and appear only after the load. If there are thousands of tables with few rows, the load is
the shorter rehearsal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import psycopg
from msgspec import Struct

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
    causes = [_Causes.among(target, refusals) for target, refusals in found.items()]
    if not (causes := [of_target for of_target in causes if of_target.refusals]):
        return
    problems, grants = list[str](), dict[str, list[str]]()
    for of_target in causes:
        node, connection = of_target.target.node, connections[of_target.target.shard]
        role = read_role(node, connection)
        problems.append(of_target.problem(role.name))
        for statement in grant_settings(role, connection, _settings_of(of_target.forbidden)):
            grants.setdefault(statement, []).append(node.id)
    what = f"{'; '.join(problems)}; no rows were loaded"
    described = (statement for one in causes for statement in describe_refusals(one.target, found[one.target]))
    details = dict[str, object](refused=[statement.document() for statement in described])
    without = [f"or {WITHOUT}"]
    if any(refusal.section == DATABASE for refusals in found.values() for refusal in refusals):
        without.append("or restore without the databases' own properties: --no-database-settings")
    if any(of_target.forbidden for of_target in causes):
        has_rows = any(cause.entry.kind == ROWS for of_target in causes for cause in of_target.refusals)
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
    remedies = [remedy_of(cause.sqlstate) for of_target in causes for cause in of_target.refusals]
    explanations = [text for of_target in causes for text in of_target.explanations()]
    raise SchemaLoadError(
        what, hint=[*dict.fromkeys(remedies), *dict.fromkeys(explanations), *without], details=details
    )


class _Causes(Struct, frozen=True):
    """The refusals on a target from which its others follow."""

    target: Target
    refusals: list[Refusal]

    @classmethod
    def among(cls, target: Target, refusals: Iterable[Refusal]) -> _Causes:
        causes = [refusal for refusal in refusals if not refusal.needs]
        # List privileges last, because extensions may have many.
        return cls(target, sorted(causes, key=lambda refusal: refusal.entry.kind == PRIVILEGES))

    @property
    def forbidden(self) -> list[Refusal]:
        """The statements that our role may not run."""
        return [cause for cause in self.refusals if cause.sqlstate in (FORBIDDEN, *NOT_GRANTED)]

    def problem(self, role: str) -> str:
        """Return the problem of the target, on which we are `role`."""
        forbidden = self.forbidden
        who = f"role {role} may not restore this DDL" if forbidden else "the DDL was refused"
        named = join_some([refusal.text() for refusal in forbidden or self.refusals], NAMED_MAX)
        return f"node {self.target.node.id}: {who}: {named}"

    def explanations(self) -> Iterator[str]:
        """Yield what usually causes such refusals, and what to do."""
        if any(cause.sqlstate == UNKNOWN_SYNTAX for cause in self.refusals):
            yield OWN_VERSION
        if any(cause.entry.kind == EXTENSION for cause in self.refusals):
            yield IN_ONE_DATABASE


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
