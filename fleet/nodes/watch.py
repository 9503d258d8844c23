"""Watching nodes while an operation uses them: waiting for a node that is silent comes to an end.

A connection whose other end says nothing, neither an answer nor that it is gone, would be waited for without end: a
network that swallows packets, a server that is stopped. A node that is only slow answers the watch, which has a session
of its own for each node and asks next to nothing. Only this process's connections are ended here; what Spark's tasks
wait for ends with their job, which whoever runs it ends by `Watch.on_silence`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psycopg

from fleet.config import Node
from fleet.nodes.connections import NodeUnreachableError, conninfo, shut_down, shut_down_sessions
from storage.errors import IndeterminateError

PROBE_SECONDS = 5.0
# After this a session is given up and another one is asked for an answer.
ANSWER_SECONDS_MAX = 10.0
SILENCE_SECONDS_MAX = 30.0
TICK_SECONDS = 0.25
STOP_SECONDS_MAX = 2.0


class Watch:
    """Asks every node again and again whether it answers, in a thread of its own."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._nodes = tuple(nodes)
        self._silent: dict[str, float] = {}
        self._acts: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="watch nodes", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask no more, and close the watch's sessions."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(STOP_SECONDS_MAX)

    @contextmanager
    def on_silence(self, act: Callable[[], object]) -> Iterator[None]:
        """While the block runs, call `act` from the watch's thread when a node falls silent, and as long as it is.

        At once where one has been silent already.
        """
        with self._lock:
            self._acts.append(act)
            is_late = bool(self._silent)
        try:
            if is_late:
                act()
            yield
        finally:
            with self._lock:
                self._acts.remove(act)

    def check(self) -> None:
        """Raise NodeUnreachableError if a node has been silent since the watch began."""
        with self._lock:
            silent = dict(self._silent)
        if silent:
            raise NodeUnreachableError(
                "; ".join(f"node {node}: no answer for {seconds:.0f} s" for node, seconds in silent.items()),
                hint="see that the server runs and that the network to it is whole, then repeat the command:"
                " it settles what this one may have left there",
                details={"node": next(iter(silent)), "nodes": list(silent)},
            )

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._follow_all())
        finally:
            self._loop.close()

    async def _follow_all(self) -> None:
        following = [asyncio.create_task(self._follow(node)) for node in self._nodes]
        await self._stop.wait()
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)

    async def _follow(self, node: Node) -> None:
        probe = _Probe(node)
        silence, due = 0.0, SILENCE_SECONDS_MAX
        try:
            while True:
                passed = await probe.asked()
                if passed is None:
                    silence, due = 0.0, SILENCE_SECONDS_MAX
                    await asyncio.sleep(PROBE_SECONDS)
                    continue
                silence += passed
                if silence >= due:
                    self._fell_silent(node, silence)
                    due = silence + PROBE_SECONDS
        finally:
            await probe.end()

    def _fell_silent(self, node: Node, seconds: float) -> None:
        with self._lock:
            self._silent[node.id] = seconds
            acts = list(self._acts)
        shut_down_sessions(node)
        for act in acts:
            # It may be too late for one, and the others must come all the same.
            with suppress(Exception):
                act()


@dataclass(slots=True)
class _Probe:
    """The watch's own session on one node, and the question that is under way in it."""

    node: Node
    session: psycopg.AsyncConnection[Any] | None = None
    question: asyncio.Task[bool] | None = None
    waited: float = 0.0

    async def asked(self) -> float | None:
        """Wait a moment for an answer: None if it has come, else the seconds that have passed without one.

        Not more than a moment, however long this process itself stood still: that is not the node's silence.
        """
        if self.question is None:
            self.question, self.waited = asyncio.create_task(self._answers()), 0.0
        began = time.monotonic()
        await asyncio.wait({self.question}, timeout=TICK_SECONDS)
        passed = min(time.monotonic() - began, TICK_SECONDS)
        if self.question.done():
            has_answered = self.question.result()
            self.question = None
            if has_answered:
                return None
            # It was refused, without any wait.
            await asyncio.sleep(TICK_SECONDS)
            return passed + TICK_SECONDS
        self.waited += passed
        if self.waited >= ANSWER_SECONDS_MAX and self.session is not None:
            shut_down(self.session)
        return passed

    async def _answers(self) -> bool:
        try:
            if self.session is None:
                self.session = await psycopg.AsyncConnection.connect(conninfo(self.node.dsn), autocommit=True)
            await self.session.execute("SELECT 1")
        except psycopg.Error as error:
            session, self.session = self.session, None
            if session is not None:
                await session.close()
            # A server that starts, or takes no more sessions, answers; libpq does not keep the code of a refusal.
            return error.sqlstate is not None or "FATAL" in str(error)
        return True

    async def end(self) -> None:
        """Close the session, whatever it waits for."""
        if self.question is not None and not self.question.done():
            if self.session is None:
                self.question.cancel()
            else:
                # Cancelled, it would ask the server to stop, and wait for that.
                shut_down(self.session)
            await asyncio.wait({self.question}, timeout=STOP_SECONDS_MAX)
        if self.session is not None:
            await self.session.close()


@contextmanager
def watch_nodes(nodes: Iterable[Node]) -> Iterator[Watch]:
    """Watch `nodes` while the block runs. What it ends with after one fell silent is raised as NodeUnreachableError."""
    watch = Watch(nodes)
    try:
        yield watch
    except IndeterminateError:
        raise
    except Exception:
        watch.check()
        raise
    finally:
        watch.stop()
