"""Threads that hand one baton on: one of them runs at a time, and the seed says which, at every call that it makes.

A lane is a shell on some machine: it runs commands one after the other. What is drawn depends on nothing but the
seed, so a history can be repeated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

# How long anything in a history may take before it is called stuck, in steps.
STEPS_MAX = 50_000


class KilledError(BaseException):
    """The process was killed: nothing that it does from here on has an effect. No `except Exception` holds it up."""


class CtrlCError(KeyboardInterrupt):
    """Somebody interrupts the process, and not the simulation of it."""


class StuckError(AssertionError):
    """A history does not end: somebody polls for ever."""


@dataclass(slots=True, eq=False)
class Lane:
    """One thread; `paused_until` is the step at which it may go on, `baton` what it waits for."""

    number: int
    work: Callable[[], None]
    paused_until: int = 0
    is_done: bool = False
    baton: threading.Lock = field(default_factory=threading.Lock)
    problem: BaseException | None = None


class Schedule:
    """Runs lanes by turns. `steps` counts the calls that were made, and is the history's time."""

    def __init__(self, draw: Random, switch: float = 0.5) -> None:
        self.draw = draw
        self.switch = switch
        self.steps = 0
        self.on_step: Callable[[], None] = lambda: None
        self._lanes: list[Lane] = []
        self._running: Lane | None = None
        self._over = threading.Lock()

    def run(self, works: list[Callable[[], None]]) -> None:
        """Run all lanes to their ends; raise the first problem that one ended by."""
        self._lanes = [Lane(number, work) for number, work in enumerate(works)]
        for lane in self._lanes:
            lane.baton.acquire()
        self._over.acquire()
        threads = [threading.Thread(target=self._carry, args=(lane,), daemon=True) for lane in self._lanes]
        for thread in threads:
            thread.start()
        self._hand_to(self._next())
        self._over.acquire()
        for thread in threads:
            thread.join()
        self._over.release()
        for lane in self._lanes:
            if lane.problem:
                raise lane.problem
        self._lanes, self._running = [], None

    def step(self) -> None:
        """Let time pass by one call; another lane may run before this returns."""
        self.steps += 1
        if self.steps > STEPS_MAX:
            raise StuckError(f"the history does not end after {STEPS_MAX} calls")
        self.on_step()
        me = self._running
        if me is None or len(self._lanes) < 2:
            return
        if me.paused_until <= self.steps and self.draw.random() >= self.switch:
            return
        following = self._next()
        if following is not me:
            self._hand_to(following)
            me.baton.acquire()

    def pause(self, steps: int) -> None:
        """The running lane goes on after so many steps, or when no other can."""
        if self._running is not None:
            self._running.paused_until = self.steps + steps

    def _carry(self, lane: Lane) -> None:
        lane.baton.acquire()
        try:
            lane.work()
        except BaseException as error:  # noqa: BLE001  # raised again in run
            lane.problem = error
        lane.is_done = True
        if all(each.is_done for each in self._lanes):
            self._over.release()
        else:
            self._hand_to(self._next())

    def _next(self) -> Lane:
        alive = [lane for lane in self._lanes if not lane.is_done]
        awake = [lane for lane in alive if lane.paused_until <= self.steps]
        return self.draw.choice(awake) if awake else min(alive, key=lambda lane: (lane.paused_until, lane.number))

    def _hand_to(self, lane: Lane) -> None:
        self._running = lane
        lane.baton.release()
