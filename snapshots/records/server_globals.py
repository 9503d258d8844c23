"""A server's globals: roles with memberships, settings and privileges on parameters; tablespaces.

Stored as one object of a shard, compressed, with every full snapshot, and again with an increment only if it differs.
"""

from __future__ import annotations

from cutline.fleet.record import Record
from cutline.snapshots.records.commit import NO_LIMIT, DatabaseSetting
from cutline.storage.errors import remember_secret

GLOBALS_FORMAT = "cutline/globals/1"


class ServerRole(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A role. `valid_until` is in UTC, "" for ever; `verifier` is that of its password, if that is stored."""

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
        """Let no error show the verifier: servers quote the statement that they refuse."""
        if self.verifier:
            remember_secret(self.verifier)


class RoleMembership(Record, frozen=True, kw_only=True, omit_defaults=True):
    """The membership of `member` in `role`. Servers before 16 have no `inherit` and `set` of it."""

    role: str
    member: str
    grantor: str
    admin: bool = False
    inherit: bool | None = None
    set: bool | None = None


class ServerTablespace(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A tablespace, and where it is on the server's machine."""

    name: str
    owner: str
    location: str
    options: tuple[str, ...] = ()
    comment: str | None = None


class ParameterPrivilege(Record, frozen=True, kw_only=True, omit_defaults=True):
    """A privilege on a parameter, SET or ALTER SYSTEM. `grantee` "" is PUBLIC, `grantor` "" a superuser."""

    parameter: str
    privilege: str
    grantee: str
    grantor: str = ""
    grantable: bool = False


class ServerGlobals(Record, frozen=True, kw_only=True, tag_field="schema", tag=GLOBALS_FORMAT):
    """The document. `settings` are those of roles in all databases. `with_verifiers`: roles have their passwords'."""

    roles: tuple[ServerRole, ...]
    memberships: tuple[RoleMembership, ...]
    settings: tuple[DatabaseSetting, ...]
    tablespaces: tuple[ServerTablespace, ...]
    with_verifiers: bool
    parameters: tuple[ParameterPrivilege, ...] = ()
