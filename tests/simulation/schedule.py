"""Threads that pass one baton: only one runs at a time, and at each of its calls the seed decides which is next.

A lane is a shell on some machine, which runs commands one after the other. Every choice depends only on the seed, so a
history can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

# A history of more steps is considered stuck.
STEPS_MAX = 50_000


class KilledError(BaseException):
    """The process was killed: nothing it does from now on has an effect. `except Exception` does not catch it."""


class CtrlCError(KeyboardInterrupt):
    """Ctrl-C in the simulated process, as opposed to one in the simulation itself."""


class StuckError(AssertionError):
    """A history does not end: some process polls for ever."""


@dataclass(slots=True, eq=False)
class Lane:
    """One thread, which waits for its `baton`; `paused_until` is the step from which it may continue."""

    number: int
    work: Callable[[], None]
    paused_until: int = 0
    is_done: bool = False
    baton: threading.Lock = field(default_factory=threading.Lock)
    problem: BaseException | None = None


class Schedule:
    """Runs lanes in turns. `steps` counts their calls, and is the time of the history."""

    def __init__(self, draw: Random, switch: float = 0.5) -> None:
        self.draw = draw
        self.switch = switch
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self._lanes: list[Lane] = []
        self._running: Lane | None = None
        self._over = threading.Lock()

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run all lanes to their ends; raise the error of the first that failed."""
        self._lanes = [Lane(number, work) for number, work in enumerate(works)]
        for lane in self._lanes:
            lane.baton.acquire()
        self._over.acquire()
        threads = [threading.Thread(target=self._run_lane, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in threads:
            thread.start()
        self._hand_to(self._next_lane())
        self._over.acquire()
        for thread in threads:
            thread.join()
        self._over.release()
        for lane in self._lanes:
            if lane.problem:
                raise lane.problem
        self._lanes, self._running = [], None

    def step(self) -> None:
        """Advance time by one call; other lanes may run before this returns."""
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise StuckError(f"the history does not end after {STEPS_MAX} calls")
        self.on_step()
        me = self._running
        if me is None or len(self._lanes) < 2:
            return
        if me.paused_until <= self.steps and self.draw.random() >= self.switch:
            return
        following = self._next_lane()
        if following is not me:
            self._hand_to(following)
            me.baton.acquire()

    def pause(self, steps: int) -> None:
        """Pause the running lane for some steps, or until no other lane can run."""
        if self._running is not None:
            self._running.paused_until = self.steps + steps

    def _run_lane(self, lane: Lane) -> None:
        lane.baton.acquire()
        try:
            lane.work()
        except BaseException as error:  # noqa: BLE001  # raised again in run
            lane.problem = error
        lane.is_done = True
        if all(each.is_done for each in self._lanes):
            self._over.release()
        else:
            self._hand_to(self._next_lane())

    def _next_lane(self) -> Lane:
        alive = [lane for lane in self._lanes if not lane.is_done]
        awake = [lane for lane in alive if lane.paused_until <= self.steps]
        return self.draw.choice(awake) if awake else min(alive, key=lambda lane: (lane.paused_until, lane.number))

    def _hand_to(self, lane: Lane) -> None:
        self._running = lane
        lane.baton.release()
