"""The effects of a command that are visible from outside: objects in the store, and statements that reach the servers.

The servers log every statement (LOGGING). A statement that only reads is no effect. One that is not known here, and
not certain to change nothing, is an effect of an undeclared kind.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import psycopg

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import EmbeddedNode
from cutline.fleet.config import Fleet

LOGGING: Mapping[str, str] = {
    "log_statement": "all",
    "log_replication_commands": "on",
    "log_line_prefix": "@%a@%p@",
}
OWN_NAME = "tests"
RELEASE_SECONDS_MAX = 10
ENTRY = re.compile(r"(?m)^@(?P<application>[^\n]*)@(?P<pid>\d+)@(?P<level>[A-Z]+):  ")
STATEMENT = re.compile(r"(?:statement|execute [^:]*|received replication command): ")

OBJECTS: Mapping[str, str] = {
    r"operations/[^/]+/intent\.json": "intent",
    r"operations/[^/]+/(outcome|conflicts|full-check)\.json": "outcome",
    r"snapshots/[^/]+/base/.*": "base object",
    r"snapshots/[^/]+/copies/.*": "copy step",
    r"snapshots/[^/]+/lists/.*": "object list",
    r"snapshots/[^/]+/schema/.*": "schema object",
    r"snapshots/[^/]+/wal/.*": "segment",
    r"snapshots/[^/]+/ended/.*": "mark of an ended chain",
    r"baselines/\d+\.json": "baseline",
    r"snapshots/[^/]+/(snapshot|increments/\d+)(\.\d+)?\.json": "commit",
}
CHANGING: Mapping[str, str] = {
    "pg_try_advisory_lock": "lock",
    "pg_advisory_unlock": "unlock",
    "create_replication_slot": "slot",
    "pg_log_standby_snapshot": "standby snapshot",
    "pg_replication_slot_advance": "slot advanced",
    "pg_drop_replication_slot": "slot dropped",
    "pg_terminate_backend": "session ended",
}
# One transaction makes a database read-only and records its previous settings.
FREEZING = re.compile(
    r"ALTER (DATABASE|ROLE \S+ IN DATABASE) \S+ SET default_transaction_read_only = "
    r"|COMMENT ON PUBLICATION \S+ IS "
)
# The tables are locked first, in the same transaction.
PUBLISHING = re.compile(r"ALTER PUBLICATION \S+ ADD TABLE |LOCK TABLE .* IN SHARE UPDATE EXCLUSIVE MODE")
MARKER = "pg_logical_emit_message"
READING_WORDS = (
    r"select|with|copy .* to stdout|begin|start transaction|commit|rollback|savepoint|release|set|show",
    r"identify_system|close|deallocate",
    r"lock table .* in access share mode|prepare|execute",
)
READING = re.compile(rf"({'|'.join(READING_WORDS)})\b", re.DOTALL | re.IGNORECASE)
# Declared volatile only because what they read changes.
ONLY_READING = {
    "pg_logical_slot_peek_binary_changes", "pg_last_wal_replay_lsn", "pg_current_wal_lsn", "pg_sequence_last_value",
    "pg_get_sequence_data",
    "pg_get_replication_slots", "pg_relation_size", "pg_table_size", "pg_total_relation_size", "pg_database_size",
    "set_config",
    "pg_is_in_recovery", "pg_control_system", "pg_control_checkpoint", "pg_control_recovery",
    "pg_current_wal_flush_lsn", "pg_current_wal_insert_lsn", "clock_timestamp", "pg_blocking_pids",
    "pg_collation_actual_version", "pg_database_collation_actual_version",
    "pg_export_snapshot", "pg_stat_clear_snapshot", "pg_last_xact_replay_timestamp", "pg_get_wal_replay_pause_state",
}  # fmt: skip


@dataclass(slots=True)
class Effects:
    """The kinds of effects since the last look. Only one command, and nothing else, may be using the fleet."""

    fleet: Fleet
    servers: EmbeddedFleet
    offsets: dict[str, int] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)
    holders: dict[str, set[int]] = field(default_factory=dict)
    volatile: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        query = "SELECT proname FROM pg_proc GROUP BY 1 HAVING bool_or(provolatile = 'v')"
        with psycopg.connect(self.servers.dsns()[0], application_name=OWN_NAME) as connection:
            self.volatile = {row[0] for row in connection.execute(query)} - ONLY_READING
        self.look()

    def await_release(self) -> None:
        """Wait until no exported snapshot is held: a server session ends slightly later than its client."""
        deadline = time.monotonic() + RELEASE_SECONDS_MAX
        while any(self._holders(node) for node in self.servers.nodes) and time.monotonic() < deadline:
            time.sleep(0.02)

    def look(self) -> set[str]:
        """The kinds of effects since the last look."""
        return {*self._objects(), *self._statements(), *self._snapshots()}

    def _objects(self) -> Iterator[str]:
        store = self.fleet.store.open()
        keys = set(store.list(""))
        for key in keys - self.keys:
            kinds = [kind for pattern, kind in OBJECTS.items() if re.fullmatch(pattern, key)]
            kind = kinds[0] if kinds else f"object {key}"
            yield "void" if kind == "commit" and b"cutline/void/" in store.read(key) else kind
        yield from (f"{key} deleted" for key in self.keys - keys)
        self.keys = keys

    def _statements(self) -> Iterator[str]:
        standbys = {node.slot for node in self.servers.nodes}
        for node in self.servers.nodes:
            text = node.log_file.read_text(errors="replace")
            text = text[: text.rfind("\n") + 1]
            news = text[self.offsets.get(node.id, 0) :]
            self.offsets[node.id] = len(text)
            entries = list(ENTRY.finditer(news))
            for entry, after in zip_longest(entries, entries[1:]):
                # The server itself, the standbys and the tests have other application names.
                if entry["application"] in {"", OWN_NAME, *standbys}:
                    continue
                body = news[entry.end() : after.start() if after else None]
                if entry["level"] == "LOG" and (found := STATEMENT.match(body)):
                    yield from self.kinds_of(body[found.end() :].strip())
                elif entry["level"] == "DETAIL" and '"kind": "' in body:
                    yield re.search(r'"kind": "(\w+)"', body)[1] + " marker"  # type: ignore[index]  # it is in it

    def kinds_of(self, statement: str) -> list[str]:
        """The kinds of effects of the statement; none if it only reads."""
        words = {word.lower() for word in re.findall(r"\w+", statement)}
        if FREEZING.match(statement):
            return ["freeze"]
        if PUBLISHING.match(statement):
            return ["table published"]
        known = [kind for word, kind in CHANGING.items() if word in words]
        if known or MARKER in words:
            return known
        called = {name.lower() for name in re.findall(r"(\w+)\s*\(", statement)}
        is_reading = READING.match(statement) and not called & self.volatile
        return [] if is_reading else [f"statement {statement}"]

    def _snapshots(self) -> Iterator[str]:
        """Whether sessions have exported or released snapshots since the last look."""
        for node in self.servers.nodes:
            was, holders = self.holders.get(node.id, set()), self._holders(node)
            if was - holders:
                yield "snapshot released"
            if holders - was:
                yield "snapshot exported"
            self.holders[node.id] = holders

    def _holders(self, node: EmbeddedNode) -> set[int]:
        query = "SELECT pid FROM pg_stat_activity WHERE backend_type = 'walsender' AND application_name LIKE 'cutline%'"
        with psycopg.connect(node.dsn(), application_name=OWN_NAME) as connection:
            return {row[0] for row in connection.execute(query)}
