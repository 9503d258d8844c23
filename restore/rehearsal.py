"""Restores by a role that is not a superuser: refuse what it may not restore before any row is loaded.

Which statements need a superuser depends on the server: its version, its extensions, what an administrator has granted.
So the DDL is tried, in the empty database that is made again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import psycopg

from fleet.nodes.connections import connect, raising_unreachable
from fleet.nodes.encodings import RAW, raw_bytes, raw_text
from fleet.nodes.privileges import INHERIT_OPTION_VERSION, Role, quote, read_role
from fleet.nodes.problems import comment
from fleet.nodes.server_messages import shorten_message
from fleet.nodes.watch import Watch
from fleet.some_names import join_some, list_some
from restore.ddl.ddl import SchemaLoadError, ending, shorten_statement, show_name
from restore.ddl.scripts import for_version
from restore.ddl.statements import batches, statements_of
from restore.ddl.unprivileged import PRIVILEGES, PUBLIC_OWNER, ROLE_CHANGES
from restore.targets.target import Target, TargetUnfitError
from snapshots.ddl.dump import EVENT_TRIGGERS, POST_DATA, PRE_DATA

FORBIDDEN = psycopg.errors.InsufficientPrivilege.sqlstate
# privilege_not_granted and privilege_not_revoked: a GRANT without effect is only a warning.
NOT_GRANTED = ("01007", "01006")
SET_QUERY = "pg_has_role(oid, 'SET')"
MEMBERS_QUERY = """
SELECT namesend(rolname), rolsuper, pg_has_role(oid, 'USAGE') AND {set}, pg_has_role(oid, 'MEMBER') FROM pg_roles
"""
# In a raw session the server converts no name.
OURS_QUERY = b"SELECT namesend(current_user)"
# The statement that makes the session's role what it is now.
ROLE_QUERY = b"""
SELECT CASE current_setting('role') WHEN 'none' THEN 'RESET ROLE'
       ELSE pg_catalog.format('SET ROLE %I', current_setting('role')) END
"""
NAMED_MAX = 5


class Refusal(NamedTuple):
    """A statement that the server refused, as raw text, with the reason."""

    statement: str
    reason: str
    sqlstate: str


def read_our_name(target: Target) -> str:
    """The name of the role that restores, as raw text."""
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as connection:
        (name,) = connection.execute(OURS_QUERY).fetchone() or (b"",)
    return raw_text(bytes(name))


def check_memberships(target: Target, connection: psycopg.Connection[Any], roles: Mapping[str, list[str]]) -> None:
    """Raise TargetUnfitError unless our role can act as each of `roles` that exists on the target.

    `roles` are raw text, each with what it owns or grants. The error's message names all others, and its hint has the
    statements that grant membership of them.
    """
    ours = read_role(target.node, connection)
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as raw:
        query = MEMBERS_QUERY.format(set=SET_QUERY if ours.version >= INHERIT_OPTION_VERSION else "true")
        known = {bytes(name): facts for name, *facts in raw.execute(query.encode())}
    problems, superusers = list[str](), list[str]()
    grants: dict[str, None] = {}
    for role, things in sorted(roles.items()):
        if role == PUBLIC_OWNER:
            # Nobody can be granted its membership: the owner of a database is its only member, in that database.
            continue
        is_super, is_usable, is_member = known.get(raw_bytes(role), (False, True, False))
        if is_super:
            superusers.append(f"{show_name(role)}, of {list_some(map(show_name, things), NAMED_MAX)}")
        elif not is_usable:
            problems.append(
                f"role {ours.name} is not a member of {show_name(role)}, which owns or grants what is restored"
            )
            grants |= dict.fromkeys(_grant(show_name(role), ours, is_member=is_member))
    if not problems and not superusers:
        return
    if superusers:
        problems.append(f"only a superuser can restore what superusers own or grant: {'; '.join(superusers)}")
    script = [
        comment(f"as a superuser on {ours.place.node}, database {ours.place.database}; for this restore:"),
        *grants,
    ]
    raise TargetUnfitError(
        f"node {target.node.id}: {'; '.join(problems)}",
        hint=["restore as a superuser, or give all of it to your role: --no-owner"] if superusers else script,
        details={"node": target.node.id, "superusers": superusers, "grants": list(grants)},
    )


def _grant(role: str, ours: Role, *, is_member: bool) -> Iterator[str]:
    """The statements that let our role act as `role`. A membership that exists keeps options that are not named."""
    if ours.version >= INHERIT_OPTION_VERSION and is_member:
        yield f"GRANT {quote(role)} TO {ours.quoted} WITH INHERIT TRUE, SET TRUE;"
    else:
        yield from ours.grant_membership(role)


def rehearse(target: Target, scripts: Mapping[str, str], watch: Watch) -> None:
    """Run the DDL in the target's empty database, and raise TargetUnfitError naming what our role may not run.

    Raises SchemaLoadError if the server refuses it for another reason, and NodeUnreachableError if the session is lost.
    """
    with (
        raising_unreachable(target.node),
        connect(target.loaded, client_encoding=RAW) as connection,
        ending(watch, connection),
    ):
        refusals = [
            one for section in (PRE_DATA, POST_DATA, EVENT_TRIGGERS) for one in _run(connection, scripts[section])
        ]
        user = connection.info.user
    forbidden = [one for one in refusals if one.sqlstate in (FORBIDDEN, *NOT_GRANTED)]
    texts = [f"{one.reason} ({shorten_statement(show_name(one.statement))})" for one in (forbidden or refusals)]
    if not texts:
        return
    listed = join_some(texts, NAMED_MAX)
    details: dict[str, object] = {"node": target.node.id, "refused": texts}
    if forbidden:
        raise TargetUnfitError(
            f"node {target.node.id}: role {user} may not restore this DDL, so no row was loaded: {listed}",
            hint="restore as a superuser, or grant the role what the statements need",
            details=details,
        )
    raise SchemaLoadError(
        f"node {target.node.id}: the DDL was refused, so no row was loaded: {listed}",
        hint="create what the statements need on the target (an extension, a tablespace), then repeat the command",
        details=details,
    )


def _run(connection: psycopg.Connection[Any], script: str) -> Iterator[Refusal]:
    """Run the script; yield what is refused. What follows is run too, and may be refused for that reason alone."""
    # The reasons. A Diagnostic can be read only in the handler: afterwards all of its fields are None.
    warnings: list[tuple[str, str]] = []

    def note(warning: psycopg.errors.Diagnostic) -> None:
        if warning.sqlstate in NOT_GRANTED:
            warnings.append((str(warning.message_primary), warning.sqlstate))

    connection.add_notice_handler(note)
    for batch in batches(for_version(script, connection.info.server_version)):
        warnings.clear()
        role = _execute(connection, ROLE_QUERY).get_value(0, 0) or b""
        is_refused = bool(_execute(connection, raw_bytes(batch)).error_message)
        if not is_refused and not warnings:
            continue
        # A batch may end as another role than it began.
        _execute(connection, role)
        for one in statements_of(batch):
            # A batch that was refused was rolled back. Of another one, the grants are run again to find the one.
            if one.bare and (is_refused or one.bare.startswith((*PRIVILEGES, *ROLE_CHANGES))):
                warnings.clear()
                result = _execute(connection, raw_bytes(one.bare))
                if result.error_message:
                    error = psycopg.errors.error_from_result(result)
                    yield Refusal(one.bare, shorten_message(error), error.diag.sqlstate or "")
                for reason, state in warnings:
                    yield Refusal(one.bare, reason, state)
    connection.remove_notice_handler(note)


def _execute(connection: psycopg.Connection[Any], statements: bytes) -> psycopg.pq.abc.PGresult:
    """Run the statements in one transaction; raise OperationalError only if the session is lost."""
    result = connection.pgconn.exec_(statements)
    if connection.broken:
        raise psycopg.OperationalError(result.error_message.decode(errors="replace"))
    return result
