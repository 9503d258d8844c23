"""A server's globals: tablespaces, and roles with their memberships, settings and privileges on parameters.

Every full snapshot stores them as one compressed object per shard. An increment stores them again only if they changed.
"""

from __future__ import annotations

from cutline.fleet.record import Record
from cutline.snapshots.records.commit import NO_LIMIT, DatabaseSetting
from cutline.storage.errors import remember_secret

GLOBALS_FORMAT = "cutline/globals/1"


class ServerRole(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A role. `valid_until` is in UTC, "" for no limit. `verifier` is the password's, if it is stored."""

    name: str
    superuser: bool = False
    inherit: bool = True
    createrole: bool = False
    createdb: bool = False
    login: bool = False
    replication: bool = False
    bypassrls: bool = False
    connection_limit: int = NO_LIMIT
    valid_until: str = ""
    comment: str | None = None
    verifier: str | None = None

    def __post_init__(self) -> None:
        """Keep the verifier out of errors: servers quote the statements that they refuse."""
        if self.verifier:
            remember_secret(self.verifier)


class RoleMembership(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The membership of `member` in `role`. `inherit` and `set` are None on servers before PostgreSQL 16."""

    role: str
    member: str
    grantor: str
    admin: bool = False
    inherit: bool | None = None
    set: bool | None = None


class ServerTablespace(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A tablespace, and its location on the server's machine."""

    name: str
    owner: str
    location: str
    options: tuple[str, ...] = ()
    comment: str | None = None


class ParameterPrivilege(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A privilege on a parameter, SET or ALTER SYSTEM. If empty, `grantee` is PUBLIC and `grantor` is a superuser."""

    parameter: str
    privilege: str
    grantee: str
    grantor: str = ""
    grantable: bool = False


class ServerGlobals(Record, frozen=True, kw_only=True, tag_field="schema", tag=GLOBALS_FORMAT):
    """The globals of a server. `settings` holds the roles' settings for all databases.

    If `with_verifiers`, the roles include the verifiers of their passwords.
    """

    roles: tuple[ServerRole, ...]
    memberships: tuple[RoleMembership, ...]
    settings: tuple[DatabaseSetting, ...]
    tablespaces: tuple[ServerTablespace, ...]
    with_verifiers: bool
    parameters: tuple[ParameterPrivilege, ...] = ()

    @property
    def unknown_roles(self) -> list[str]:
        """The roles that memberships, settings, tablespaces or privileges name, but that are not among the roles.

        The predefined roles, whose names begin with `pg_`, are never listed.
        """
        named = {name for one in self.memberships for name in (one.role, one.member, one.grantor)}
        named |= {setting.role for setting in self.settings} | {tablespace.owner for tablespace in self.tablespaces}
        named |= {name for one in self.parameters for name in (one.grantee, one.grantor)}
        unknown = named - {role.name for role in self.roles} - {""}
        return sorted(name for name in unknown if not name.startswith("pg_"))
