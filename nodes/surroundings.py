"""What runs a fleet's servers, and settings of theirs that could end a chain later: warnings for `init`.

Nothing here keeps a snapshot from being taken. What only its manager knows of a server, such as Patroni's
`ignore_slots`, can't be read from the server, so its warning says what must be set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from cutline.fleet.config import Fleet, Node
from cutline.fleet.messages import name_nodes
from cutline.fleet.units import size_text
from cutline.nodes.managers import MANAGERS_EXPRESSION, MARKS, advice_on
from cutline.nodes.sessions import Sessions

# An increment may be late once, and then needs its own time.
INTERVALS_KEPT = 3
# Before this version, a slot can't have FAILOVER and decode prepared transactions.
FAILOVER_VERSION = 180000
SURROUNDINGS_QUERY = f"""
SELECT current_database(),
       {MANAGERS_EXPRESSION},
       EXISTS (SELECT FROM pg_settings WHERE name = 'wal_level' AND pending_restart),
       -- In seconds; new in version 18.
       coalesce((SELECT setting::bigint * CASE unit WHEN 'min' THEN 60 ELSE 1 END
                   FROM pg_settings WHERE name = 'idle_replication_slot_timeout'), 0),
       -- In megabytes; -1 for no limit.
       (SELECT setting::bigint FROM pg_settings WHERE name = 'max_slot_wal_keep_size'),
       (SELECT setting::bigint / 1000.0 FROM pg_settings WHERE name = 'recovery_min_apply_delay')::float,
       coalesce(current_setting('synchronized_standby_slots', true), '') ~ '(^|[, ])"?cutline_',
       -- A promoted server's slots stay `synced`.
       EXISTS (SELECT FROM pg_replication_slots s
                WHERE slot_name ^@ 'cutline_' AND to_jsonb(s) ->> 'failover' = 'true'
                  AND NOT (pg_is_in_recovery() AND to_jsonb(s) ->> 'synced' = 'true')),
       coalesce(current_setting('synchronized_standby_slots', true), '') <> '',
       current_setting('server_version_num')::int,
       -- In bytes.
       (SELECT setting::bigint FROM pg_settings WHERE name = 'wal_segment_size')
"""


class Surroundings(Struct, frozen=True):
    """The facts about one server that the warnings depend on.

    `database` is the server's name of the node's database, and `managers` are names of MARKS. `idle_timeout_seconds` is
    0 and `wal_kept_bytes` is negative if the server has no such limit.
    """

    database: str
    managers: Sequence[str]
    level_is_pending: bool
    idle_timeout_seconds: int
    wal_kept_bytes: int
    apply_delay_seconds: float
    names_own_slots: bool
    has_failover_slots: bool
    waits_for_standbys: bool
    server_version: int
    wal_file_bytes: int


class SurroundingsWarning(Struct, frozen=True):
    """A warning about some nodes, with its stable name, and what to do."""

    name: str
    nodes: tuple[str, ...]
    message: str
    action: str

    @property
    def text(self) -> str:
        """The warning as one line."""
        return f"{name_nodes(self.nodes)}: {self.message}: {self.action}"

    def to_json(self) -> dict[str, Any]:
        """Return the warning as JSON."""
        return {"warning": self.name, "nodes": list(self.nodes), "message": self.message, "action": self.action}


def read_surroundings(sessions: Sessions) -> dict[str, Surroundings]:
    """Read the facts about the servers of all nodes. Raises NodeUnreachableError."""

    def read(_node: Node, connection: psycopg.Connection[Any]) -> Surroundings:
        row = connection.execute(SURROUNDINGS_QUERY).fetchone()
        if row is None:
            raise RuntimeError("a query without a table returned no row")
        database, managers, pending, timeout, kept_megabytes, *others = row
        return Surroundings(database, tuple(managers), pending, timeout, kept_megabytes << 20, *others)

    return sessions.ask_nodes(read)


def find_warnings(fleet: Fleet, found: Mapping[str, Surroundings]) -> list[SurroundingsWarning]:
    """Return the warnings for the servers of these nodes."""
    return [warning for warning in _all(fleet, found) if warning.nodes]


def _all(fleet: Fleet, found: Mapping[str, Surroundings]) -> Iterator[SurroundingsWarning]:
    nodes = {node.id: node for node in fleet.nodes}
    every_seconds = float(fleet.watch.every) if fleet.watch else 0.0
    for manager, _ in MARKS:
        managed = tuple(node for node, one in found.items() if manager in one.managers)
        databases = [found[node].database for node in managed]
        yield SurroundingsWarning(manager, managed, *advice_on(manager, databases))
    yield SurroundingsWarning(
        "wal-level-pending",
        tuple(node for node, one in found.items() if one.level_is_pending),
        "wal_level changes with the next restart; with a logical slot, a server below wal_level = logical does not"
        " start",
        "set wal_level = logical again before the restart",
    )
    times = "at times that are not known, without [watch] every"
    every = f"every {_seconds_text(every_seconds)}" if every_seconds else times
    for timeout in sorted({one.idle_timeout_seconds for one in found.values()} - {0}):
        if not every_seconds or timeout < INTERVALS_KEPT * every_seconds:
            yield SurroundingsWarning(
                "idle-slot-timeout",
                tuple(node for node, one in found.items() if one.idle_timeout_seconds == timeout),
                f"idle_replication_slot_timeout is {_seconds_text(timeout)}, and increments are taken {every}: a slot"
                " that is idle for longer is invalidated, which ends its copy or its chain",
                "set it to 0, or to several times the interval of increments",
            )
    for kept in sorted({one.wal_kept_bytes for one in found.values() if one.wal_kept_bytes >= 0}):
        small = tuple(
            node
            for node, one in found.items()
            if one.wal_kept_bytes == kept and kept < nodes[node].retained_wal_bytes_max
        )
        yield SurroundingsWarning(
            "slot-wal-limit",
            small,
            f"max_slot_wal_keep_size is {size_text(kept)}, less than max_retained_wal: with more WAL between two"
            " increments the server invalidates the slot, before Cutline warns of it",
            "set it above max_retained_wal, or lower max_retained_wal in fleet.toml; until then, take an increment for"
            f" every {size_text(kept // 2)} of WAL",
        )
    for size_bytes in sorted({one.wal_file_bytes for one in found.values()}):
        yield SurroundingsWarning(
            "wal-segment-size",
            tuple(
                node
                for node, one in found.items()
                if one.wal_file_bytes == size_bytes and nodes[node].retained_wal_bytes_max < size_bytes
            ),
            f"wal_segment_size is {size_text(size_bytes)}, more than max_retained_wal: a switch to the next WAL file"
            " may take a slot past this limit that needs no more, and then the next create drops it",
            f"set max_retained_wal to at least {size_bytes >> 20}MiB in fleet.toml",
        )
    yield SurroundingsWarning(
        "delayed-standby",
        tuple(
            node
            for node, one in found.items()
            if nodes[node].backup_of is not None and one.apply_delay_seconds > fleet.standby_wait_seconds
        ),
        f"recovery_min_apply_delay is longer than the {_seconds_text(fleet.standby_wait_seconds)} for which increments"
        " wait for a standby ([copies] wait), so they leave out its copy",
        "use a standby without a delay, or remove this one from fleet.toml",
    )
    yield SurroundingsWarning(
        "synchronized-standby-slots",
        tuple(node for node, one in found.items() if one.names_own_slots),
        "synchronized_standby_slots names slots of Cutline; it takes physical slots only, and logical decoding of"
        " failover slots waits for them",
        "remove slots that begin with cutline_ from synchronized_standby_slots",
    )
    wanted = [node for node in found if fleet.has_failover_slots(nodes[node])]
    yield SurroundingsWarning(
        "failover-slot",
        tuple(node for node in found if found[node].has_failover_slots and node not in wanted),
        "a slot of Cutline has the failover property; standbys have slots of the same name, which stops their slot"
        " synchronization with an error",
        'turn it off: ALTER_REPLICATION_SLOT "…" (FAILOVER false), in a session with replication=database',
    )
    unused = "[copies] failover_slots has no effect"
    primaries = [node for node in found if fleet.failover_slots and nodes[node].backup_of is None]
    yield SurroundingsWarning(
        "failover-slots-unused",
        tuple(node for node in primaries if node not in wanted),
        f"{unused}: the shard's standbys in fleet.toml have slots of the same name",
        "nothing has to be done, as a failover to one of these standbys continues the chain anyway",
    )
    is_old = {node for node in wanted if found[node].server_version < FAILOVER_VERSION}
    yield SurroundingsWarning(
        "failover-slots-unused",
        tuple(node for node in wanted if node in is_old),
        f"{unused}: before PostgreSQL 18, a slot that decodes prepared transactions can't be a failover slot",
        "list the standbys in fleet.toml, so that a chain continues after a failover",
    )
    yield SurroundingsWarning(
        "failover-slots-wait",
        tuple(node for node in wanted if node not in is_old and found[node].waits_for_standbys),
        "synchronized_standby_slots is set: reading a failover slot waits for these standbys, so while one of them is"
        " down, each create waits for [copies] wait, and then reads the slot without the property",
        "leave synchronized_standby_slots unset, or remove [copies] failover_slots and take a new full snapshot",
    )


def unlimited_text(fleet: Fleet, found: Mapping[str, Surroundings]) -> str:
    """Return the note about servers without max_slot_wal_keep_size; "" if all have it.

    It is not a warning, because having no limit is PostgreSQL's default, and does not endanger a chain.
    """
    unlimited = [node for node, one in found.items() if one.wal_kept_bytes < 0]
    if not unlimited:
        return ""
    where = "all nodes" if len(unlimited) == len(fleet.nodes) else name_nodes(unlimited)
    return (
        f"max_slot_wal_keep_size is not set on {where}: while no create reaches the nodes and the store, nothing limits"
        " the WAL that they retain; to limit it, set it above max_retained_wal and below the free space of the disk"
        " with pg_wal"
    )


def _seconds_text(seconds: float) -> str:
    return f"{seconds:,.0f} s"
