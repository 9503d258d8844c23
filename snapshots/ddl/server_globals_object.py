"""Read a server's globals (the objects outside its databases), store them, and read them back.

Globals are read once per create. The fingerprint does not cover them, so their changes never invalidate a cut. Password
verifiers are stored only if our role may read pg_authid, which managed services don't allow.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

import msgspec
import psycopg
import zstandard

from cutline.fleet.progress import Progress
from cutline.fleet.record import from_json, to_builtins
from cutline.nodes.encodings import fetch_texts, fetch_texts_at_once
from cutline.nodes.sessions import Sessions, in_parallel
from cutline.snapshots.operations.operation import Operation
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.commit import GLOBALS, DatabaseSetting, StoredObject
from cutline.snapshots.records.documents import ddl_prefix, decompress
from cutline.snapshots.records.server_globals import (
    ParameterPrivilege,
    RoleMembership,
    ServerGlobals,
    ServerRole,
    ServerTablespace,
)
from cutline.storage.store import ObjectStore
from cutline.storage.storing import create_or_find
from cutline.wal.segments.damage import ObjectDamagedError, read_listed

GLOBALS_BYTES_MAX = 256 << 20
# Names that begin with pg_ are reserved for PostgreSQL.
ROLES_QUERY = """
SELECT r.rolname, r.rolsuper, r.rolinherit, r.rolcreaterole, r.rolcreatedb, r.rolcanlogin, r.rolreplication,
       r.rolbypassrls, r.rolconnlimit,
       CASE WHEN r.rolvaliduntil IS NULL THEN '' WHEN NOT isfinite(r.rolvaliduntil) THEN r.rolvaliduntil::text
            ELSE (r.rolvaliduntil AT TIME ZONE 'UTC')::text || '+00' END,
       shobj_description(r.oid, 'pg_authid')
  FROM pg_roles r WHERE r.rolname !~ '^pg_' ORDER BY 1
"""
VERIFIERS_QUERY = "SELECT rolname, rolpassword FROM pg_authid WHERE rolpassword IS NOT NULL"
# PostgreSQL 16 introduced inherit_option and set_option.
MEMBERSHIPS_QUERY = """
SELECT r.rolname, m.rolname, coalesce(g.rolname, ''), a.admin_option, (to_jsonb(a) ->> 'inherit_option')::boolean,
       (to_jsonb(a) ->> 'set_option')::boolean
  FROM pg_auth_members a JOIN pg_roles r ON r.oid = a.roleid JOIN pg_roles m ON m.oid = a.member
  LEFT JOIN pg_roles g ON g.oid = a.grantor
 WHERE m.rolname !~ '^pg_' ORDER BY 1, 2, 3
"""
SETTINGS_QUERY = """
SELECT split_part(s.setting, '=', 1), substr(s.setting, strpos(s.setting, '=') + 1), r.rolname
  FROM pg_db_role_setting g JOIN pg_roles r ON r.oid = g.setrole
 CROSS JOIN unnest(g.setconfig) WITH ORDINALITY AS s (setting, number)
 WHERE g.setdatabase = 0 ORDER BY 3, s.number
"""
# The first superuser is the recorded grantor for all superusers. Its own privileges exist on every server.
PARAMETERS_QUERY = """
SELECT p.parname, a.privilege_type, coalesce(e.rolname, ''), CASE WHEN r.oid = 10 THEN '' ELSE r.rolname END,
       a.is_grantable
  FROM pg_parameter_acl p CROSS JOIN aclexplode(p.paracl) a JOIN pg_roles r ON r.oid = a.grantor
  LEFT JOIN pg_roles e ON e.oid = a.grantee
 WHERE a.grantee <> 10 ORDER BY 1, 3, 2, 4
"""
TABLESPACES_QUERY = """
SELECT spcname, pg_get_userbyid(spcowner), pg_tablespace_location(oid), coalesce(spcoptions, '{}'),
       shobj_description(oid, 'pg_tablespace')
  FROM pg_tablespace WHERE spcname !~ '^pg_' ORDER BY 1
"""


def read_globals(connection: psycopg.Connection[Any], *, passwords: bool = False) -> ServerGlobals:
    """Read the globals of the session's server; with `passwords`, include the verifiers if our role may read them."""
    verifiers: dict[str, str] = {}
    with_verifiers = passwords
    if passwords:
        try:
            verifiers = dict(fetch_texts(connection, VERIFIERS_QUERY))
        except psycopg.errors.InsufficientPrivilege:
            with_verifiers = False
    # From one snapshot, so that every role that is named is among the roles.
    of_roles, of_memberships, of_tablespaces, of_parameters, of_settings = fetch_texts_at_once(
        connection, [ROLES_QUERY, MEMBERSHIPS_QUERY, TABLESPACES_QUERY, PARAMETERS_QUERY, SETTINGS_QUERY]
    )
    roles = [
        ServerRole(
            name=name,
            superuser=superuser,
            inherit=inherit,
            createrole=createrole,
            createdb=createdb,
            login=login,
            replication=replication,
            bypassrls=bypassrls,
            connection_limit=limit,
            valid_until=until,
            comment=comment,
            verifier=verifiers.get(name),
        )
        for name, superuser, inherit, createrole, createdb, login, replication, bypassrls, limit, until, comment in (
            of_roles
        )
    ]
    memberships = [
        RoleMembership(role=role, member=member, grantor=grantor, admin=admin, inherit=inherit, set=can_set)
        for role, member, grantor, admin, inherit, can_set in of_memberships
    ]
    tablespaces = [
        ServerTablespace(name=name, owner=owner, location=location, options=tuple(options), comment=comment)
        for name, owner, location, options, comment in of_tablespaces
    ]
    parameters = [
        ParameterPrivilege(
            parameter=parameter, privilege=privilege, grantee=grantee, grantor=grantor, grantable=grantable
        )
        for parameter, privilege, grantee, grantor, grantable in of_parameters
    ]
    return ServerGlobals(
        roles=tuple(roles),
        memberships=tuple(memberships),
        settings=tuple(DatabaseSetting(*row) for row in of_settings),
        tablespaces=tuple(tablespaces),
        with_verifiers=with_verifiers,
        parameters=tuple(parameters),
    )


def store_globals(
    store: ObjectStore, sessions: Sessions, operation: Operation, chain: Chain | None, progress: Progress
) -> list[StoredObject]:
    """Store the globals of every primary's server unless the chain already contains them; return the new objects.

    If an object that the chain lists is missing or altered in the store, it is stored again, and a note says so.
    """
    passwords = sessions.fleet.with_passwords
    primaries = sessions.ask_primaries(partial(read_globals, passwords=passwords))
    if lacking := [
        shard for shard, server_globals in primaries.items() if passwords and not server_globals.with_verifiers
    ]:
        progress.note(
            f"{', '.join(lacking)}: Cutline's role is not allowed to read pg_authid, so roles are stored without"
            " their passwords"
        )

    def is_stored(shard: str) -> bool:
        try:
            # Compare the contents: the digests of encrypted objects always differ.
            return chain is not None and read_stored_globals(store, chain, shard) == primaries[shard]
        except ObjectDamagedError as error:
            progress.note(f"{error.message}; the roles and tablespaces of {shard} will be stored again")
            return False

    def store_one(shard: str) -> StoredObject | None:
        if is_stored(shard):
            return None
        body = zstandard.compress(msgspec.json.encode(to_builtins(primaries[shard])))
        prefix = ddl_prefix(operation.snapshot, shard, operation.id)
        key = f"{prefix}/{GLOBALS}-{secrets.token_hex(4)}.json.zst"
        return StoredObject(key, GLOBALS, shard, len(body), create_or_find(store, key, body), {})

    return [stored_object for stored_object in in_parallel(store_one, primaries) if stored_object is not None]


def read_stored_globals(store: ObjectStore, chain: Chain, shard: str) -> ServerGlobals | None:
    """Read the shard's globals at the last commit; None if no commit lists them. Raises ObjectDamagedError."""
    stored = chain.globals_object(shard)
    return None if stored is None else read_globals_object(store, stored)


def read_globals_object(store: ObjectStore, stored: StoredObject) -> ServerGlobals:
    """Read the globals in the object; raise ObjectDamagedError."""
    body = read_listed(store, stored.node, stored.key, (stored.size, stored.digest))
    try:
        found: ServerGlobals = from_json(decompress(body, GLOBALS_BYTES_MAX), ServerGlobals)
    except (ValueError, msgspec.DecodeError) as error:
        detail = f"it can't be read: {error}"
        raise ObjectDamagedError(key=stored.key, kind="unreadable", node=stored.node, detail=detail) from error
    return found
