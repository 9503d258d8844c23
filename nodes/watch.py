"""Query nodes and watch them, so that no wait for a node that has stopped answering lasts forever.

If a network drops packets or a server process is suspended, a connection gets neither an answer nor an error, and
waiting for it would never end. The watch sends each node a trivial query in a separate session; a node that is only
slow answers it. The watch shuts down this process's connections to a silent node. Tasks in other processes
have their own connections: the caller cancels their jobs through `Watch.on_silence`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Generic, TypeVar

import psycopg
from msgspec import Struct
from psycopg.conninfo import make_conninfo

from cutline.fleet.config import Node
from cutline.fleet.messages import NODES_NAMED_MAX, join_some, without_node
from cutline.nodes.connections import NodeUnreachableError, connect, probe_conninfo, unreachable_error
from cutline.nodes.daemon_threads import start_daemons
from cutline.nodes.encodings import ADAPTERS
from cutline.nodes.open_sessions import shut_down, shut_down_after, shut_down_sessions
from cutline.storage.errors import IndeterminateError, SnapshotError
from cutline.storage.process_limits import is_used_up

T = TypeVar("T")


class NodeAnswers(Struct, Generic[T], frozen=True):
    """The answers, keyed by node; for each node that did not answer, the reason."""

    found: Mapping[str, T]
    problems: Mapping[str, str]


# How long this process takes to open a session and ask, at most: other nodes don't wait longer than that for a thread.
ASKING_SECONDS_PER_NODE = 0.01


class NodesQuery(Generic[T]):
    """Queries all `nodes`, up to THREADS_MAX at a time, in background threads that start with this object.

    `ask` receives the node and a separate session, which is shut down after `seconds_max`, so that no thread waits much
    longer. For a large fleet, asking all nodes may take ASKING_SECONDS_PER_NODE longer for each node.
    """

    def __init__(
        self, nodes: Iterable[Node], ask: Callable[[Node, psycopg.Connection[Any]], T], seconds_max: float
    ) -> None:
        self._nodes, self._ask, self._seconds_max = tuple(nodes), ask, seconds_max
        self._found: dict[str, T] = {}
        self._problems: dict[str, str] = {}
        self._errors: list[Exception] = []
        self._deadline = time.monotonic() + seconds_max + len(self._nodes) * ASKING_SECONDS_PER_NODE
        self._left = deque(self._nodes)
        self._threads = start_daemons(self._ask_one, self._left, "query")

    def _ask_one(self, node: Node) -> None:
        seconds = min(max(self._deadline - time.monotonic(), 0.0), self._seconds_max)
        try:
            with (
                connect(node, connect_timeout=str(int(seconds) or 1)) as connection,
                shut_down_after(connection, seconds),
            ):
                self._found[node.id] = self._ask(node, connection)
        except SnapshotError as error:
            self._problems[node.id] = without_node(error.message, node.id)
        except psycopg.Error as error:
            self._problems[node.id] = without_node(unreachable_error(node, error).message, node.id)
        except Exception as error:  # noqa: BLE001  # raised by answers(); for example, this process is out of memory
            self._errors.append(error)

    def answers(self) -> NodeAnswers[T]:
        """Wait for the answers until the time limit."""
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        self._left.clear()
        for error in self._errors:
            raise error
        answered, problems = dict(self._found), dict(self._problems)
        late = f"no answer within {self._seconds_max:.0f} s"
        return NodeAnswers(
            {node.id: answered[node.id] for node in self._nodes if node.id in answered},
            {node.id: problems.get(node.id, late) for node in self._nodes if node.id not in answered},
        )


PROBE_SECONDS = 5.0
# If a node has not answered for this long, the watch opens a new session.
ANSWER_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 30.0
TICK_SECONDS = 0.25
STOP_SECONDS_MAX = 2.0
CONNECTING_SECONDS_MAX = 0.5
# The database's owner may have put objects in front of PostgreSQL's own.
SET_PATH = "SELECT pg_catalog.set_config('search_path', 'pg_catalog', false)"
# The classes of errors in a statement itself: not of a session that was ended, nor of a lack of resources.
REFUSED_QUESTION = ("0A", "22", "42")
REACHABLE = "check that the server is running and can be reached"


class SilentNodeError(NodeUnreachableError):
    """A node stopped answering while an operation was using it."""


def silent_error(silent: Mapping[str, float]) -> SilentNodeError:
    """Return the error for nodes that have not answered for so many seconds."""
    return SilentNodeError(
        join_some((f"node {node}: no answer for {seconds:.0f} s" for node, seconds in silent.items()), NODES_NAMED_MAX),
        hint=f"{REACHABLE}, then repeat the command: it cleans up anything that was left there",
        details={"node": next(iter(silent)), "nodes": list(silent)},
    )


Answer = list[tuple[Any, ...]]


class Question(Struct, frozen=True):
    """What a watch also asks its nodes, every `seconds`.

    `tell` gets the node's id and the rows, in the watch's thread: it must not wait. The query must name nothing outside
    of pg_catalog.
    """

    query: str
    parameters: Callable[[str], Mapping[str, object]]
    tell: Callable[[str, Answer], object]
    seconds: float


class Watch:
    """Queries every node repeatedly in a separate thread, and notes the nodes that don't answer."""

    def __init__(self, nodes: Iterable[Node], name: str) -> None:
        self._nodes, self._name = tuple(nodes), name
        self._silent: dict[str, float] = {}
        self._left_out: set[str] = set()
        self._is_ended = False
        # Each with the nodes whose silence it is for, None for all.
        self._acts: list[tuple[Callable[[], object], frozenset[str] | None]] = []
        self._question: Question | None = None
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watch nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop querying and close the watch's sessions."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_SECONDS_MAX)

    @contextmanager
    def on_silence(self, act: Callable[[], object], nodes: Collection[str] | None = None) -> Iterator[None]:
        """While the block runs, call `act` in the watch's thread when a node falls silent, and repeatedly afterwards.

        If a node has already fallen silent, or end_all was called, call `act` at once. With `nodes`, only their silence
        counts.
        """
        entry = act, None if nodes is None else frozenset(nodes)
        with self._lock:
            self._acts.append(entry)
            is_late = self._is_ended or any(_concerns(entry, node) for node in self._silent)
        try:
            if is_late:
                act()
            yield
        finally:
            with self._lock:
                self._acts.remove(entry)

    def only(self, nodes: Iterable[str]) -> WatchOfSome:
        """Return the watch for work that needs only these nodes: the silence of others does not end it."""
        return WatchOfSome(self, frozenset(nodes))

    @contextmanager
    def asking(self, question: Question) -> Iterator[None]:
        """While the block runs, ask every node the question, in the sessions that the watch has anyway."""
        self._question = question
        try:
            yield
        finally:
            self._question = None

    def end_all(self) -> None:
        """Call every act of `on_silence`, present and future: the command was interrupted and should stop waiting."""
        with self._lock:
            self._is_ended = True
            acts = [act for act, _ in self._acts]
        for act in acts:
            with suppress(Exception):
                act()

    def silent(self) -> dict[str, float]:
        """Return the nodes that have fallen silent, with the seconds since their last answer."""
        with self._lock:
            return dict(self._silent)

    def leave_out(self, node: str) -> None:
        """Ignore from now on whether the node answers: the command continues without it."""
        with self._lock:
            self._left_out.add(node)
            self._silent.pop(node, None)

    def check(self) -> None:
        """Raise SilentNodeError if a node has fallen silent since the watch started."""
        if silent := self.silent():
            raise silent_error(silent)

    @contextmanager
    def naming_silent(self) -> Iterator[None]:
        """If the block fails after a node fell silent, raise SilentNodeError instead."""
        try:
            yield
        except (IndeterminateError, SilentNodeError):
            raise
        except Exception:
            self.check()
            raise

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._query_all())
        finally:
            self._loop.close()

    async def _query_all(self) -> None:
        tasks = [asyncio.create_task(self._query(node)) for node in self._nodes]
        await self._stop.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _query(self, node: Node) -> None:
        probe = _Probe(node, self._name, lambda: self._question)
        silence, due = 0.0, SILENCE_SECONDS_MAX
        try:
            while True:
                passed = await probe.poll()
                if passed is None:
                    silence, due = 0.0, SILENCE_SECONDS_MAX
                    await asyncio.sleep(self._interval)
                    continue
                silence += passed
                if silence >= due:
                    self._report_silence(node, silence)
                    due = silence + PROBE_SECONDS
        finally:
            await probe.end()

    @property
    def _interval(self) -> float:
        question = self._question
        return PROBE_SECONDS if question is None else min(PROBE_SECONDS, question.seconds)

    def _report_silence(self, node: Node, seconds: float) -> None:
        with self._lock:
            if node.id in self._left_out:
                return
            self._silent[node.id] = seconds
            acts = [entry[0] for entry in self._acts if _concerns(entry, node.id)]
        shut_down_sessions([node])
        for act in acts:
            # An act that is called too late may raise; all others must still be called.
            with suppress(Exception):
                act()


def _concerns(entry: tuple[Callable[[], object], frozenset[str] | None], node: str) -> bool:
    return entry[1] is None or node in entry[1]


class WatchOfSome(Struct, frozen=True):
    """A watch for work on some `nodes`: only their silence counts."""

    watch: Watch
    nodes: frozenset[str]

    def on_silence(self, act: Callable[[], object]) -> AbstractContextManager[None]:
        """Call `act` as Watch.on_silence does, if one of the nodes falls silent."""
        return self.watch.on_silence(act, self.nodes)


class _Probe(Struct):
    """The watch's session on one node, and its query in flight."""

    node: Node
    name: str
    question: Callable[[], Question | None] = lambda: None
    may_ask: bool = True
    session: psycopg.AsyncConnection[Any] | None = None
    query: asyncio.Task[bool] | None = None
    waited: float = 0.0

    async def poll(self) -> float | None:
        """Wait TICK_SECONDS for an answer; return None if it arrived, else the seconds that passed without it.

        A tick counts as TICK_SECONDS at most, because the node was not silent while this process was suspended.
        """
        if self.query is None:
            self.query, self.waited = asyncio.create_task(self._answers()), 0.0
        began = time.monotonic()
        await asyncio.wait({self.query}, timeout=TICK_SECONDS)
        passed = min(time.monotonic() - began, TICK_SECONDS)
        if self.query.done():
            has_answered = self.query.result()
            self.query = None
            if has_answered:
                return None
            # The node refused at once, so almost no time has passed.
            await asyncio.sleep(TICK_SECONDS)
            return passed + TICK_SECONDS
        self.waited += passed
        if self.waited >= ANSWER_SECONDS_MAX and self.session is not None:
            shut_down(self.session)
        return passed

    async def _answers(self) -> bool:
        try:
            if self.session is None:
                conninfo = make_conninfo(probe_conninfo(self.node.dsn), application_name=self.name)
                self.session = await psycopg.AsyncConnection.connect(conninfo, autocommit=True, context=ADAPTERS)
            if (question := self.question()) is None or not self.may_ask:
                await self.session.execute("SELECT 1")
            else:
                await self._ask(self.session, question)
        except psycopg.Error as error:
            session, self.session = self.session, None
            if session is not None:
                await session.close()
            # A server that is starting or has no free connections does answer; libpq drops the SQLSTATE of its refusal.
            # If a limit of this process was reached, the node is not silent.
            return error.sqlstate is not None or "FATAL" in str(error) or is_used_up(error)
        except (OSError, RuntimeError):
            # Such an error is also due to a limit of this process: for example, no thread can be started to resolve a
            # host name. If the watch ended because of the error, it would no longer notice silent nodes.
            return True
        return True

    async def _ask(self, session: psycopg.AsyncConnection[Any], question: Question) -> None:
        try:
            await session.execute(SET_PATH)
            cursor = await session.execute(question.query.encode(), question.parameters(self.node.id))
            rows = await cursor.fetchall()
        except psycopg.Error as error:
            # If the server refuses the question itself, the node is watched without it.
            self.may_ask = not (error.sqlstate or "").startswith(REFUSED_QUESTION)
            raise
        # Whatever happens to a report, the node is watched.
        with suppress(Exception):
            question.tell(self.node.id, rows)

    async def end(self) -> None:
        """Close the session, even while a query is in flight."""
        if self.query is not None and not self.query.done():
            if self.session is None:
                # If connecting were cancelled at once, a session that the server has already started would be left
                # behind.
                await asyncio.wait({self.query}, timeout=CONNECTING_SECONDS_MAX)
                self.query.cancel()
            else:
                # A cancelled task would send the server a cancel request and wait for it.
                shut_down(self.session)
            await asyncio.wait({self.query}, timeout=STOP_SECONDS_MAX)
        if self.session is not None:
            await self.session.close()


@contextmanager
def watch_nodes(nodes: Iterable[Node], name: str = "cutline") -> Iterator[Watch]:
    """Watch `nodes` while the block runs; if it fails after a node fell silent, raise SilentNodeError instead.

    `name` is the application_name of the watch's sessions.
    """
    watch = Watch(nodes, name)
    try:
        with watch.naming_silent():
            yield watch
    finally:
        watch.stop()
