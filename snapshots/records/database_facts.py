"""What a commit says of a shard's database besides its rows: what a restore needs of a server to make it again."""

from __future__ import annotations

from msgspec import field

from fleet.record import Count, Record


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


class DatabaseFacts(Record, frozen=True, omit_defaults=True):
    """A shard's database right after the cut: its size, its extensions with their versions, and its collations.

    `lz4_columns`: the columns whose values are compressed by lz4, as `schema.table.column`.
    """

    size_bytes: Count
    extensions: dict[str, str] = field(default_factory=dict)
    collations: tuple[UsedCollation, ...] = ()
    lz4_columns: tuple[str, ...] = ()
