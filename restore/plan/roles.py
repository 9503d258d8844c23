"""The roles named in a snapshot's DDL: which of them a target lacks, and which the restoring role may act as.

A server stores a role's name as bytes in the encoding of the database where the role was created, and shows the same
bytes in all databases, whatever their encoding. So names are compared as bytes in the encoding of the restored
database.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import psycopg

from cutline.fleet.messages import list_some
from cutline.nodes.connections import connect, disrupted_error, node_of, raising_unreachable
from cutline.nodes.encodings import RAW, raw_bytes, raw_text
from cutline.nodes.problems import INHERIT_OPTION_VERSION, Role, comment, quote, read_role
from cutline.nodes.server_errors import remedy_of, shorten_message
from cutline.restore.ddl.database_ddl import PRELOADED
from cutline.restore.ddl.ddl import show_name
from cutline.restore.ddl.server_roles import (
    RoleStatement,
    attributes_statement,
    comment_statement,
    creating_statement,
    may_be_granted,
    membership_statement,
    memberships_of_created,
    parameter_statement,
    role_setting_statement,
    role_settings,
    withheld_attributes,
)
from cutline.restore.ddl.unprivileged import PUBLIC_OWNER
from cutline.restore.plan.plan import RestorePlan
from cutline.restore.scope.scope import RoleChanges
from cutline.restore.targets.target import MARK, Superusers, Target, TargetUnfitError, find_marked, mark_role
from cutline.snapshots.records.commit import DatabaseProperties, count_by_node, is_no_role
from cutline.snapshots.records.server_globals import ParameterPrivilege, ServerGlobals
from cutline.storage.errors import UsageError

SET_QUERY = "pg_has_role(oid, 'SET')"
MEMBERS_QUERY = """
SELECT namesend(rolname), rolsuper, pg_has_role(oid, 'USAGE') AND {set}, pg_has_role(oid, 'MEMBER') FROM pg_roles
"""
# In a raw session the server sends the stored bytes without conversion.
OURS_QUERY = b"SELECT namesend(current_user)"
NAMED_MAX, KNOWN_NAMED_MAX = 5, 20
# The usual name of a server's first superuser.
BOOTSTRAP = "postgres"


def read_our_name(target: Target) -> str:
    """Return the name of the restoring role, as raw text."""
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as connection:
        (name,) = connection.execute(OURS_QUERY).fetchone() or (b"",)
    return raw_text(bytes(name))


def check_memberships(target: Target, connection: psycopg.Connection[Any], roles: Mapping[str, list[str]]) -> None:
    """Raise TargetUnfitError unless our role can act as each of `roles` that exists on the target.

    `roles` maps role names (raw text) to the objects that they own or granted privileges on. The error's message names
    all roles that we can't act as, and its hint contains the statements that grant membership of them.
    """
    ours = read_role(target.node, connection)
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as raw:
        query = MEMBERS_QUERY.format(set=SET_QUERY if ours.version >= INHERIT_OPTION_VERSION else "true")
        known = {bytes(name): facts for name, *facts in raw.execute(query.encode())}
    problems, superusers, maps = list[str](), list[str](), list[str]()
    grants: dict[str, None] = {}
    for role, things in sorted(roles.items()):
        if role == PUBLIC_OWNER:
            # Membership in this role can't be granted: its only member is a database's owner, in that database.
            continue
        is_super, is_usable, is_member = known.get(raw_bytes(role), (False, True, False))
        if is_super:
            superusers.append(f"{show_name(role)}, of {list_some(map(show_name, things), NAMED_MAX)}")
            maps.append(f"--role-map {shlex.quote(f'{show_name(role)}={ours.name}')}")
        elif not is_usable:
            problems.append(
                f"role {ours.name} is not a member of {show_name(role)}, which owns restored objects or grants"
                " privileges on them"
            )
            grants |= dict.fromkeys(_grant(show_name(role), ours, is_member=is_member))
    if not problems and not superusers:
        return
    if superusers:
        problems.append(
            f"only a superuser can restore objects that superusers own and privileges that they granted:"
            f" {'; '.join(superusers)}"
        )
    script = [
        comment(f"as a superuser on {ours.place.node}, database {ours.place.database}; for this restore:"),
        *grants,
    ]
    raise TargetUnfitError(
        f"node {target.node.id}: {'; '.join(problems)}",
        hint=[
            f"restore as a superuser, or make your role the owner of superusers' objects: {' '.join(maps)}",
            "or make it the owner of all objects: --no-owner",
        ]
        if superusers
        else script,
        details={"node": target.node.id, "superusers": superusers, "grants": list(grants)},
    )


def _grant(role: str, ours: Role, *, is_member: bool) -> Iterator[str]:
    """Yield the statements that let our role act as `role`; an existing membership keeps its other options."""
    if ours.version >= INHERIT_OPTION_VERSION and is_member:
        yield f"GRANT {quote(role)} TO {ours.quoted} WITH INHERIT TRUE, SET TRUE;"
    else:
        yield from ours.grant_membership(role)


KNOWN_QUERY = "SELECT namesend(rolname) FROM pg_roles"
BYTES_QUERY = """
SELECT convert(name, 'UTF8', %s) FROM unnest(%s::bytea[]) WITH ORDINALITY AS given (name, n) ORDER BY n
"""
SHOWN_QUERY = "SELECT convert(%s, %s, 'UTF8')"
RESERVED_QUERY = "SELECT name FROM pg_settings WHERE context <> 'user'"
ANYBODYS_QUERY = "SELECT name FROM pg_settings WHERE context = 'user'"
# An extension's settings have its name as a prefix; a session doesn't recognize them until it loads the library.
EXTENSIONS_QUERY = "SELECT name FROM pg_available_extensions"
# CREATE ROLE raises the first error for an existing role, and the second if another session creates the role at the
# same time.
EXISTS = (psycopg.errors.DuplicateObject, psycopg.errors.UniqueViolation)
ATTEMPTS = 3
RIGHTS_QUERY = "SELECT rolsuper OR rolcreaterole FROM pg_roles WHERE rolname = current_user"


def missing_roles(
    target: Target,
    connection: psycopg.Connection[Any],
    roles: Iterable[str],
    encoding: str,
    *,
    of_database: Iterable[str] = (),
    may_create: bool,
    by_superuser: bool = False,
) -> list[str]:
    """Return the roles that the target's server lacks; raise TargetUnfitError if we may not create them.

    The roles `of_database` are needed only for the database's own properties. `may_create`: the user allows roles to
    be created; `by_superuser`: a superuser creates them for our role. `encoding` is the restored database's encoding.
    """
    roles, of_database = list(roles), list(of_database)
    may_do_without = set(of_database).difference(roles)
    roles += sorted(may_do_without)
    existing = find_existing_roles(target, connection, roles, encoding)
    missing = [role for role in roles if role not in existing]
    node = target.node.id
    # A drill's roles don't have the properties of the snapshot's roles, and that drill or the next one will drop them.
    if not by_superuser and (drilled := sorted(existing.intersection(role for role, _ in find_marked(connection)))):
        raise TargetUnfitError(
            f"node {node}: a drill has created roles that the restore needs, and will drop them: {', '.join(drilled)}",
            hint="wait for the drill to end; if it was killed, the next drill there drops them:"
            " snapshot drill NAME --to FILE",
            details={"node": node, "roles": drilled},
        )
    details: dict[str, object] = {"node": node, "roles": missing}
    if missing and not may_create:
        statements = [f"  CREATE ROLE {quote(role)};" for role in missing]
        where = "" if all(map(str.isascii, missing)) else f" (in a database of encoding {encoding})"
        raise TargetUnfitError(
            f"node {node} lacks roles that own the snapshot's objects or have privileges on them: {', '.join(missing)}",
            hint=[
                "restore with --create-roles, which creates them with their properties; or create them without"
                f" properties{where}:",
                *statements,
                *["or omit the database's owner, privileges and settings: --no-database-settings"]
                * may_do_without.issuperset(missing),
            ],
            details=details,
        )
    if missing and not by_superuser and connection.execute(RIGHTS_QUERY).fetchone() != (True,):
        raise TargetUnfitError(
            f"node {node}: role {connection.info.user} may not create the missing roles: {', '.join(missing)}",
            hint=f"ALTER ROLE {quote(connection.info.user)} CREATEROLE;",
            details=details,
        )
    return missing


def find_existing_roles(
    target: Target, connection: psycopg.Connection[Any], roles: Iterable[str], encoding: str
) -> set[str]:
    """Return the roles that exist on the target's server; `encoding` is the restored database's encoding."""
    roles = list(roles)
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as raw:
        known = {bytes(name) for (name,) in raw.execute(KNOWN_QUERY)}
    names = name_bytes(connection, roles, encoding)
    return {role for role, name in zip(roles, names, strict=True) if name in known}


def name_bytes(connection: psycopg.Connection[Any], roles: Iterable[str], encoding: str) -> list[bytes]:
    """Return the bytes that a server stores for roles created in a database with this `encoding`.

    Raises TargetUnfitError if a character does not exist in the encoding.
    """
    names = [role.encode() for role in roles]
    try:
        return [bytes(name) for (name,) in connection.execute(BYTES_QUERY, (encoding, names))]
    except psycopg.errors.UntranslatableCharacter as error:
        raise TargetUnfitError(
            f"the database's encoding {encoding} can't represent characters in --role-map or --group:"
            f" {shorten_message(error)}",
            hint="choose a name that this encoding can represent",
        ) from error


def read_our_shown_name(target: Target, connection: psycopg.Connection[Any], encoding: str) -> str:
    """Return the name of the restoring role as a database of this encoding shows it.

    Raises TargetUnfitError if it can't, in which case the server does not let the role connect to such a database.
    """
    try:
        name = raw_bytes(read_our_name(target))
        ((shown,),) = connection.execute(SHOWN_QUERY, (name, encoding)).fetchall()
    except psycopg.DataError as error:
        raise TargetUnfitError(
            f"node {target.node.id}: role {connection.info.user} can't connect to a database of encoding {encoding}:"
            f" {shorten_message(error)}",
            hint="restore as a role whose name is ASCII",
            details={"node": target.node.id},
        ) from error
    return bytes(shown).decode()


def find_role_changes(target: Target, connection: psycopg.Connection[Any], plan: RestorePlan) -> RoleChanges:
    """Return the role substitutions to make in the target's DDL (raw text)."""
    scope, encoding = plan.request.scope, plan.chain.baseline[target.source].encoding
    before, after = (
        map(raw_text, name_bytes(connection, [pair[side] for pair in scope.role_map], encoding)) for side in (0, 1)
    )
    pairs = dict(zip(before, after, strict=True))
    with raising_unreachable(target.node), connect(target.maintenance, client_encoding=RAW) as raw:
        known = frozenset(raw_text(bytes(name)) for (name,) in raw.execute(KNOWN_QUERY))
    return RoleChanges(pairs, scope.no_owner, read_our_name(target), known)


def check_mapped(plan: RestorePlan, met: Container[str]) -> None:
    """Raise UsageError if --role-map names a role that is not in the snapshot; `met` are the roles in its DDL."""
    known = {
        role
        for target in plan.targets
        for role in (*plan.roles(target), *roles_of(plan.chain.database_properties(target.source)))
    }
    mapped = {role for role, _ in plan.request.scope.role_map}
    if count_by_node(plan.chain.full):
        # Large objects are restored as of the full snapshot, and may name roles that the server has lost since.
        known |= {role for roles in plan.chain.full.roles.values() for role in roles}
        mapped = {role for role in mapped if not is_no_role(role)}
    if unknown := sorted(role for role in mapped if role not in known and role not in met):
        raise UsageError(
            f"--role-map: there is no role {', '.join(unknown)} in snapshot {plan.request.name}",
            hint=f"its roles are: {list_some(sorted(known), KNOWN_NAMED_MAX)}",
            details={"roles": unknown},
        )


def roles_of(properties: DatabaseProperties | None) -> Iterator[str]:
    """Yield the roles that a database's own properties name."""
    if properties is None:
        return
    yield properties.owner
    for privilege in properties.privileges or ():
        yield from filter(None, (privilege.grantor, privilege.grantee))
    yield from (setting.role for setting in properties.settings if setting.role)


def create_roles(
    target: Target,
    roles: Iterable[str],
    superusers: Superusers | None = None,
    server_globals: ServerGlobals | None = None,
    former_superusers: Sequence[str] = (),
) -> tuple[list[str], list[str]]:
    """Create all of the roles or none; return the new roles, as `node: role`, and lines about their missing properties.

    Roles in `server_globals` get the properties they had; other roles get no login, password or privileges. Unless our
    role is a superuser, it becomes a member of the new roles, because otherwise it could not make them owners. If
    `superusers` is given, a superuser creates the roles. `former_superusers` get the privileges of the snapshot's other
    roles, and each those of the ones after it. The session is in the database being restored, not in the locked
    maintenance database, because the server stores the names in the encoding of the session's database. Roles belong to
    the whole server, so they remain if the restore fails.
    """
    roles = list(roles)
    if not roles:
        return [], []
    node = superusers.node_of(target) if superusers else target.loaded
    with raising_unreachable(target.node), connect(node) as connection:
        notes = list[str]()
        with connection.transaction():
            created = _create_missing(target, connection, roles, superusers, server_globals, notes)
            if server_globals and created:
                notes += _give_what_they_had(connection, server_globals, created, roles)
            _stand_in_for_superusers(connection, former_superusers, created, roles)
        return [f"{target.node.id}: {role}" for role in created], [f"node {target.node.id}: {note}" for note in notes]


def _create_missing(
    target: Target,
    connection: psycopg.Connection[Any],
    roles: Iterable[str],
    superusers: Superusers | None,
    server_globals: ServerGlobals | None,
    notes: list[str],
) -> list[str]:
    created: list[str] = []
    ours = read_role(target.node, connection)
    members = "" if ours.is_super else " ROLE CURRENT_USER"
    if superusers:
        members = f" ROLE {quote(superusers.role)}"
    known = {role.name: role for role in server_globals.roles} if server_globals else {}
    for role in roles:
        forms = [RoleStatement(f"CREATE ROLE {quote(role)} NOLOGIN;", "")]
        if role in known:
            forms.insert(0, creating_statement(known[role], powers=False, verifier=False))
        for number, form in enumerate(forms, 1):
            try:
                with connection.transaction():
                    connection.execute(f"{form.statement.removesuffix(';')}{members}".encode())
                    if superusers and superusers.mark:
                        mark_role(connection, role, superusers.mark)
            except EXISTS as error:
                # Either another shard's target is on the same server, or another session is creating the role.
                _check_made_here(target, connection, role, superusers)
                if isinstance(error, psycopg.errors.UniqueViolation):
                    notes.append(f"role {role} was created by another session at the same time, and was left unchanged")
                break
            except psycopg.Error as error:
                if connection.broken:
                    raise
                if remedy_of(error):
                    raise disrupted_error(target.node.id, error, f"role {role}") from error
                if number < len(forms):
                    notes.append(
                        f"role {role} was created without its properties: {shorten_message(error)}: {form.shown}"
                    )
                    continue
                raise TargetUnfitError(
                    f"node {target.node.id}: role {role} can't be created: {shorten_message(error)}",
                    hint="create the role on the target, then repeat the command",
                    details={"node": target.node.id, "roles": [role]},
                ) from error
            created.append(role)
            break
    return created


def _check_made_here(
    target: Target, connection: psycopg.Connection[Any], role: str, superusers: Superusers | None
) -> None:
    """In a drill, raise TargetUnfitError if another drill or session has created the role since the checks.

    A drill marks the roles that it creates. It must not act as any other roles, or drop them when it ends.
    """
    if superusers and superusers.mark and (role, superusers.mark) not in find_marked(connection):
        raise TargetUnfitError(
            f"node {target.node.id}: another session has just created role {role}",
            hint="if another drill is running there, wait for it to end; then repeat the command",
            details={"node": target.node.id, "roles": [role]},
        )


def _give_what_they_had(
    connection: psycopg.Connection[Any], server_globals: ServerGlobals, created: Container[str], missing: Container[str]
) -> Iterator[str]:
    """Give the roles their settings, comments and memberships; yield a line with the statement for each omission.

    `missing` are all roles that the server lacked; another shard's target on the same server may have created some.
    """
    reserved = find_reserved_settings(connection)
    extensions = {name.lower() for (name,) in connection.execute(EXTENSIONS_QUERY)}
    for role in server_globals.roles:
        if role.name not in created:
            continue
        if withheld := withheld_attributes(role):
            statement = attributes_statement(role, withheld)
            them = "it" if len(withheld) == 1 else "them"
            yield f"role {role.name} was created without {', '.join(withheld)}; to grant {them}: {statement}"
        if MARK.fullmatch(role.comment or ""):
            yield f"role {role.name} was created without its comment, which looks like the mark of a drill's role"
        elif role.comment is not None:
            yield from _refused(connection, comment_statement(role))
        for setting in role_settings(server_globals, role.name):
            statement = role_setting_statement(setting)
            name = setting.name.lower()
            prefix, dot, _ = name.partition(".")
            if name in reserved or (dot and prefix in extensions):
                yield (
                    f"role {role.name} was created without the setting {setting.name}, which could give it extra"
                    " privileges; to set it:"
                    f" {statement}"
                )
            else:
                yield from _refused(connection, statement)
        yield from _grant_parameters(
            connection, [parameter for parameter in server_globals.parameters if parameter.grantee == role.name]
        )
    for membership in memberships_of_created(server_globals, created):
        if not may_be_granted(membership, server_globals, missing):
            statement = membership_statement(membership)
            yield (
                f"role {membership.member} was not made a member of {membership.role}; to grant the membership:"
                f" {statement}"
            )
        elif problems := list(_refused(connection, membership_statement(membership))):
            # The grantor may not grant the membership on this server, or does not exist here.
            yield from problems if list(_refused(connection, membership_statement(membership, grantor=False))) else ()


def _stand_in_for_superusers(
    connection: psycopg.Connection[Any], former: Sequence[str], created: Container[str], roles: Collection[str]
) -> None:
    """Make the roles that were superusers members of the snapshot's other `roles`, if this restore created one of them.

    Superusers' views and functions read other owners' tables. In a drill nobody but Cutline is a superuser, and all of
    the roles have nothing but the snapshot's objects.
    """
    options = " WITH INHERIT TRUE" if connection.info.server_version >= INHERIT_OPTION_VERSION else ""
    ranked = [role for role in former if role in roles]
    for number, member in enumerate(ranked, 1):
        # PostgreSQL allows no circles, so a superuser gets only the privileges of the superusers after it.
        for role in [*sorted(set(roles) - set(former)), *ranked[number:]]:
            if member in created or role in created:
                list(_refused(connection, f"GRANT {quote(role)} TO {quote(member)}{options};"))


def _grant_parameters(connection: psycopg.Connection[Any], privileges: Iterable[ParameterPrivilege]) -> Iterator[str]:
    """Grant SET on parameters that every role may set; yield a line with the statement for every other privilege."""
    anybodys = {name.lower() for (name,) in connection.execute(ANYBODYS_QUERY)}
    for privilege in privileges:
        statement = parameter_statement(privilege)
        # The parameters of a library that is not loaded are unknown, so assume that not every role may set them.
        if privilege.privilege == "SET" and privilege.parameter in anybodys:
            yield from _refused(connection, statement)
        else:
            what = f"{privilege.privilege} on parameter {privilege.parameter}, which could give it extra privileges"
            yield f"role {privilege.grantee} was not granted {what}; to grant it: {statement}"


def find_reserved_settings(connection: psycopg.Connection[Any]) -> set[str]:
    """Return the settings, in lowercase, that not every role may set or that make each session load a library.

    The former may give power over the server or over other roles' objects. If the library is missing on the server, the
    latter would prevent everyone from logging in.
    """
    return {name.lower() for (name,) in connection.execute(RESERVED_QUERY)} | PRELOADED


def _refused(connection: psycopg.Connection[Any], statement: str) -> Iterator[str]:
    for attempt in range(ATTEMPTS):
        try:
            with connection.transaction():
                connection.execute(statement.encode())
        except psycopg.Error as error:
            if connection.broken:
                raise
            if remedy_of(error):
                raise disrupted_error(node_of(connection), error, statement) from error
            if not _is_concurrent(error) or attempt == ATTEMPTS - 1:
                yield f"not done: {statement} {shorten_message(error)}"
                return
        else:
            return


def _is_concurrent(error: psycopg.Error) -> bool:
    """Whether another session changed the same catalog row concurrently, so that another attempt may succeed.

    The message can be compared because the server does not translate internal errors.
    """
    is_changed = isinstance(error, psycopg.errors.InternalError_) and "tuple concurrently " in str(error)
    return is_changed or isinstance(error, psycopg.errors.UniqueViolation)
