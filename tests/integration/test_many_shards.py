"""A fleet of many shards: nodes are asked in parallel, with a bounded number of threads, and idle nodes store nothing.

The servers are the benchmark's (benchmarks/tiny_servers.py). With a thousand nodes, anything that is done on one node
after the other takes seconds, even if it takes a millisecond.
"""

from __future__ import annotations

import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from benchmarks.tiny_servers import TinyServers, execute_on, tiny_servers
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.nodes.sessions import open_sessions
from cutline.nodes.watch import NodesQuery
from cutline.snapshots.base_copy import copy_slots
from cutline.snapshots.create.context import CreateRequest
from cutline.snapshots.create.full import create_full
from cutline.snapshots.create.increment import create_increment
from cutline.snapshots.create.initialise import initialise
from cutline.snapshots.records.commit import Commit, Increment
from cutline.spark.on_demand import SparkOnDemand
from cutline.storage.local import LocalStore

SHARDS, STANDBYS = 8, 1
NAME = "chain"


@dataclass(frozen=True)
class Small:
    """The fleet, and the commands as calls that do their work in this process."""

    servers: TinyServers
    fleet: Fleet

    def full(self, name: str) -> Commit:
        with SparkOnDemand(self.fleet, "test") as spark:
            return create_full(self.fleet, CreateRequest(name), spark, Silent())

    def increment(self, name: str) -> Commit:
        with SparkOnDemand(self.fleet, "test") as spark:
            return create_increment(self.fleet, CreateRequest(name), spark, Silent())


@pytest.fixture(scope="module")
def small() -> Iterator[Small]:
    # The path of a socket is limited in length.
    with tempfile.TemporaryDirectory(prefix="cutline-many-", dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "nodes").mkdir()
        with tiny_servers(folder / "nodes", shards=SHARDS, standbys=STANDBYS) as servers:
            fleet = load_fleet(servers.write_fleet(folder / "fleet.toml", f"file://{folder}/store"))
            initialise(fleet, Silent())
            found = Small(servers, fleet)
            found.full(NAME)
            yield found


class Statements:
    """Counts the statements that the main thread executes, by the function that asks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by_function = Counter[str]()
        execute = psycopg.Cursor.execute

        def counted(cursor: psycopg.Cursor[Any], *args: Any, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                frame = sys._getframe(1)
                while frame.f_back and frame.f_code.co_filename.endswith(("connections.py", "connection.py")):
                    frame = frame.f_back
                self.by_function[f"{frame.f_globals['__name__']}:{frame.f_lineno}"] += 1
            return execute(cursor, *args, **options)

        monkeypatch.setattr(psycopg.Cursor, "execute", counted)

    def check(self) -> None:
        assert {function for function, count in self.by_function.items() if count >= SHARDS} == set()


def test_the_servers_are_different_primaries_with_their_standbys(small: Small) -> None:
    query = "SELECT (pg_control_system()).system_identifier, pg_is_in_recovery()"
    found = {}
    for node in small.servers.nodes:
        with psycopg.connect(node.dsn()) as connection:
            found[node.id] = connection.execute(query).fetchone()
    identifiers = {found[node.id][0] for node in small.servers.primaries}  # type: ignore[index]
    assert len(identifiers) == SHARDS
    for node in small.servers.nodes[SHARDS:]:
        assert found[node.id] == (found[node.backup_of or ""][0], True)  # type: ignore[index]


def test_init_asks_no_node_after_the_other(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = Statements(monkeypatch)
    initialise(small.fleet, Silent())
    statements.check()


def test_creates_ask_no_node_after_the_other(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    statements = Statements(monkeypatch)
    small.full("parallel")
    small.increment("parallel")
    statements.check()


def test_an_idle_node_costs_an_increment_three_requests_at_most_and_no_object(
    small: Small, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute_on(small.servers.primaries, "UPDATE item SET n = n + 1 WHERE id = 1")
    small.increment(NAME)
    # This increment still reads the end of the segments that the one before has stored.
    small.increment(NAME)
    keys = list[str]()

    def counting(name: str) -> None:
        method = getattr(LocalStore, name)

        def counted(store: LocalStore, key: str, *args: Any, **options: Any) -> Any:
            keys.append(key)
            return method(store, key, *args, **options)

        monkeypatch.setattr(LocalStore, name, counted)

    # The other methods call these.
    for name in ("create", "read", "read_range", "size", "list", "list_children"):
        counting(name)
    before = set(small.fleet.store.open().list(""))
    keys.clear()
    commit = small.increment(NAME)
    requests = Counter(match[1] for key in keys if (match := re.search(r"/(s\d+(?:-b\d+)?)/", key)))
    # The next segment is looked for before the tables are prepared and before the slot is read. An increment compares
    # the roles of a primary's server with the stored ones.
    assert requests == {node.id: 2 if node.backup_of else 3 for node in small.fleet.nodes}
    assert len(keys) - requests.total() < 60
    assert isinstance(commit, Increment)
    assert commit.idle.keys() == requests.keys()
    assert len(set(small.fleet.store.open().list("")) - before) == 2


def test_no_more_slots_than_allowed_are_created_at_a_time(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    running, most, lock = [0], [0], threading.Lock()
    create = copy_slots.create_exported_slot

    def counted(*args: Any, **options: Any) -> Any:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        try:
            return create(*args, **options)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(copy_slots, "SLOTS_AT_ONCE", 3)
    monkeypatch.setattr(copy_slots, "create_exported_slot", counted)
    threads = threading.active_count()
    nodes = small.fleet.nodes
    with copy_slots.export_snapshots(small.fleet, nodes, "cutline_bounded", 30, Silent()) as slots:
        assert slots.keys() == {node.id for node in nodes}
        assert most[0] == 3
        # Nothing waits for the slots any more.
        assert threading.active_count() <= threads
    copy_slots.drop_copy_slots(nodes, "cutline_bounded", Silent())


def test_an_error_leaves_out_the_slots_that_have_not_begun(small: Small, monkeypatch: pytest.MonkeyPatch) -> None:
    begun = list[str]()

    def fail(node: Any, *_: Any, **__: Any) -> Any:
        begun.append(node.id)
        raise NodeUnreachableError("node s1: gone", hint="")

    monkeypatch.setattr(copy_slots, "SLOTS_AT_ONCE", 1)
    monkeypatch.setattr(copy_slots, "create_exported_slot", fail)
    with (
        pytest.raises(NodeUnreachableError),
        copy_slots.export_snapshots(small.fleet, small.fleet.nodes, "cutline_none", 30, Silent()),
    ):
        pass
    assert len(begun) == 1


def test_a_query_of_many_nodes_may_take_longer_than_that_of_one(small: Small) -> None:
    nodes = [replace(small.fleet.primaries[n % SHARDS], id=f"n{n}") for n in range(200)]
    query = NodesQuery(nodes, lambda *_: time.sleep(0.1), 0.2)
    assert query.answers().problems == {}


def test_an_error_names_some_of_many_unreachable_nodes_and_lists_all(small: Small, tmp_path: Path) -> None:
    dsn = f"postgresql://postgres@/bank?host={tmp_path}"
    nodes = tuple(replace(small.fleet.primaries[0], id=f"n{n}", dsn=dsn) for n in range(30))
    with pytest.raises(NodeUnreachableError) as raised, open_sessions(replace(small.fleet, nodes=nodes), nodes):
        pass
    message = raised.value.message
    assert "node n9: " in message
    assert "node n10: " not in message
    assert message.endswith("; and 20 more")
    assert raised.value.details["nodes"] == [node.id for node in nodes]
