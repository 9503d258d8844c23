"""Run plain tasks in threads of this process: work so small that starting Spark would take longer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from cutline.fleet.progress import Progress
from cutline.nodes.connections import shut_down_sessions
from cutline.nodes.sessions import Sessions
from cutline.storage.store import stoppable_requests

Task = TypeVar("Task")
Report = TypeVar("Report")
# Each task may hold as much memory as one in an executor.
THREADS_MAX = 8
END_POLL_SECONDS = 0.1


def run_own_tasks(
    work: Callable[[Task], Report],
    tasks: Sequence[Task],
    sessions: Sessions,
    progress: Progress,
    at_once: int = THREADS_MAX,
) -> list[Report]:
    """Run `work` on every task, so many `at_once`; return the reports in the order of the tasks.

    If this thread is interrupted, the tasks' requests to the store, and all connections of this process to the nodes
    but `sessions` are ended until the tasks have: they must release their slots before the caller cleans up the nodes.
    The sessions' watch does the same to the connections if a node falls silent.
    """
    stops: list[Callable[[], None]] = []

    def run(task: Task) -> Report:
        with stoppable_requests() as stop:
            stops.append(stop)
            return work(task)

    if not tasks:
        return []
    with ThreadPoolExecutor(max_workers=min(len(tasks), at_once)) as threads:
        futures = [threads.submit(run, task) for task in tasks]
        try:
            for _ in as_completed(futures):
                progress.advance(1)
        except BaseException:
            for future in futures:
                future.cancel()
            while wait(futures, END_POLL_SECONDS).not_done:
                for stop in stops:
                    stop()
                for node in sessions.nodes:
                    shut_down_sessions(node, sessions.connections.values())
            raise
        return [future.result() for future in futures]
