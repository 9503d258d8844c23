"""Whether the role that restores may act as the roles that own or grant what it restores."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

import psycopg

from cutline.fleet.nodes.connections import connect, raising_unreachable
from cutline.fleet.nodes.encodings import RAW, raw_bytes, raw_text
from cutline.fleet.nodes.privileges import INHERIT_OPTION_VERSION, Role, quote, read_role
from cutline.fleet.nodes.problems import comment
from cutline.fleet.some_names import list_some
from cutline.restore.ddl.ddl import show_name
from cutline.restore.ddl.unprivileged import PUBLIC_OWNER
from cutline.restore.targets.target import Target, TargetUnfitError

SET_QUERY = "pg_has_role(oid, 'SET')"
MEMBERS_QUERY = """
SELECT namesend(rolname), rolsuper, pg_has_role(oid, 'USAGE') AND {set}, pg_has_role(oid, 'MEMBER') FROM pg_roles
"""
# In a raw session the server converts no name.
OURS_QUERY = b"SELECT namesend(current_user)"
NAMED_MAX = 5


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
    problems, superusers, maps = list[str](), list[str](), list[str]()
    grants: dict[str, None] = {}
    for role, things in sorted(roles.items()):
        if role == PUBLIC_OWNER:
            # Nobody can be granted its membership: the owner of a database is its only member, in that database.
            continue
        is_super, is_usable, is_member = known.get(raw_bytes(role), (False, True, False))
        if is_super:
            superusers.append(f"{show_name(role)}, of {list_some(map(show_name, things), NAMED_MAX)}")
            maps.append(f"--role-map {shlex.quote(f'{show_name(role)}={ours.name}')}")
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
        hint=[
            f"restore as a superuser, or give your role what superusers own: {' '.join(maps)}",
            "or give it all that anybody owns: --no-owner",
        ]
        if superusers
        else script,
        details={"node": target.node.id, "superusers": superusers, "grants": list(grants)},
    )


def _grant(role: str, ours: Role, *, is_member: bool) -> Iterator[str]:
    """The statements that let our role act as `role`. A membership that exists keeps options that are not named."""
    if ours.version >= INHERIT_OPTION_VERSION and is_member:
        yield f"GRANT {quote(role)} TO {ours.quoted} WITH INHERIT TRUE, SET TRUE;"
    else:
        yield from ours.grant_membership(role)
