"""What a commit says of a shard's database besides its rows: what a restore needs of a server to make it again."""

from __future__ import annotations

from typing import Literal

from msgspec import field

from cutline.fleet.record import Count, Record

NO_LIMIT = -1


class UsedCollation(Record, frozen=True, omit_defaults=True):
    """A collation that the database uses, or that was created in it.

    `is_own`: the DDL creates it; any other is to be the server's own, of the same name. `provider` is that of
    pg_collation; `locales` are those that it needs of the machine or of ICU.
    """

    schema: str
    name: str
    provider: str
    locales: tuple[str, ...]
    is_own: bool = False


class DatabaseSetting(Record, frozen=True, omit_defaults=True):
    """A setting of the database (ALTER DATABASE … SET), or of `role` in it; `value` is as pg_db_role_setting has it."""

    name: str
    value: str
    role: str = ""


class DatabasePrivilege(Record, frozen=True, omit_defaults=True):
    """A privilege on the database; the `grantee` "" is PUBLIC."""

    grantor: str
    grantee: str
    privilege: Literal["CREATE", "TEMPORARY", "CONNECT"]
    with_grant_option: bool = False


class SecurityLabel(Record, frozen=True):
    """A security label of the database."""

    provider: str
    label: str


class DatabaseProperties(Record, frozen=True, kw_only=True, omit_defaults=True):
    """What belongs to a database itself, not to what is in it.

    `tablespace` is "" for pg_default. `privileges` None: those that every new database has.
    """

    owner: str
    comment: str | None = None
    tablespace: str = ""
    connection_limit: int = NO_LIMIT
    is_template: bool = False
    privileges: tuple[DatabasePrivilege, ...] | None = None
    settings: tuple[DatabaseSetting, ...] = ()
    labels: tuple[SecurityLabel, ...] = ()


class DatabaseFacts(Record, frozen=True, omit_defaults=True):
    """A shard's database right after the cut: its size, its extensions with their versions, and its collations.

    `lz4_columns`: the columns whose values are compressed by lz4, as `schema.table.column`. Older versions of Cutline
    stored no `properties`.
    """

    size_bytes: Count
    extensions: dict[str, str] = field(default_factory=dict)
    collations: tuple[UsedCollation, ...] = ()
    lz4_columns: tuple[str, ...] = ()
    properties: DatabaseProperties | None = None
