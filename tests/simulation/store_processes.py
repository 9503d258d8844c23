"""Simulated processes: what each command does to the store by the product's own code, and to the model's nodes.

A process makes its calls through a FaultyStore of its own; before each one the others may run, and it may be killed,
interrupted or put to sleep, and lose the fleet's lock meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from fleet.nodes.lock import FleetBusyError, FleetLockLostError
from fleet.progress import Silent
from storage.errors import SnapshotError
from storage.store import ObjectStore
from tests.simulation.faulty_store import ANY, OF_CREATE, Call, Fault, FaultyStore, Weather
from tests.simulation.repository_model import Attempt, NodeSilentError, RepositoryWorld
from tests.simulation.schedule import CtrlCError, KilledError

NOT_ON_NODES = (Fault.THROTTLED,)
PAUSE_STEPS_MAX = 150
# What happens to no other calls happens to these in most cases.
USUAL: Mapping[str, tuple[Fault, ...]] = {"list": (Fault.STALE,), "read": (Fault.TRUNCATED,)}
OF_COMMIT = tuple(fault for fault in OF_CREATE if fault not in ANY)
USUAL_RATE = 0.7
COMMIT_KEY = re.compile(r"snapshots/[^/]+/(snapshot|increments/\d+)(\.\d+)?\.json")
# Where sleeping is most dangerous: after the last check, before the commit is put.
COMMIT_PAUSE = 0.3
INDETERMINATE = 5
NO_SKEW = timedelta()


@dataclass(frozen=True, slots=True)
class Climate:
    """How often a call meets a fault: any, a listing, an object's bytes, a commit's put; and how often one sleeps."""

    fault: float = 0.0
    listing: float = 0.0
    body: float = 0.0
    commit: float = 0.0
    pause: float = 0.0

    def rate(self, call: Call) -> float:
        """How often this call meets a fault."""
        if call.verb == "list":
            return self.listing
        if is_commit(call):
            return self.commit
        is_data = call.verb == "read" and call.key.endswith(".parquet")
        return self.body if is_data or call.verb == "create" else self.fault


def is_commit(call: Call) -> bool:
    """Whether the call puts a commit or a void."""
    return call.verb == "create" and COMMIT_KEY.fullmatch(call.key) is not None


CALM = Climate()


class ProcessWeather(Weather):
    """What one process meets: by the climate, or at its n-th call exactly what `plan` says, the first being 0.

    `aside` is what others do while it is stopped before its n-th call. `calls` are those that it has made.
    """

    def __init__(self, process: Process, climate: Climate) -> None:
        super().__init__()
        self.met = process.world.tally
        self._process = process
        self._climate = climate
        self.plan: Mapping[int, Fault] | None = None
        self.aside: tuple[int, Callable[[], object]] | None = None
        self.kills_before_commit = False
        self.calls: list[Call] = []

    def before(self, call: Call) -> None:
        """Let others run; whoever was killed meanwhile does nothing any more."""
        process, world = self._process, self._process.world
        if process.is_dead:
            raise KilledError
        world.schedule.step()
        if self._climate.pause and world.draw.random() < self._pause(call):
            process.sleep()
        if self.aside and self.aside[0] == len(self.calls):
            process.stand_aside(self.aside[1])
        world.running = process
        self.calls.append(call)
        if call.verb == "create":
            world.is_marking(call.key)

    def fault(self, call: Call) -> Fault | None:
        """See Weather."""
        if self.kills_before_commit and is_commit(call):
            return Fault.CRASH_BEFORE
        if self.plan is not None:
            fault = self.plan.get(len(self.calls) - 1)
            return fault if fault in call.possible else None
        if self._climate is CALM:
            return None
        rate, draw = self._climate.rate(call), self._process.world.draw
        if not rate or draw.random() >= rate:
            return None
        usual = OF_COMMIT if is_commit(call) else USUAL.get(call.verb, ())
        return draw.choice(usual if usual and draw.random() < USUAL_RATE else call.possible)

    def below(self, size: int) -> int:
        """See Weather."""
        return self._process.world.below(size)

    def _pause(self, call: Call) -> float:
        return COMMIT_PAUSE if is_commit(call) else self._climate.pause

    def end(self, fault: Fault) -> BaseException:
        """A crash is final, whatever the process would do on its way out; an interrupt lets it."""
        if fault in (Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER):
            self._process.was_interrupted = True
            return CtrlCError()
        self._process.is_dead = True
        return KilledError()

    def struck(self, fault: Fault, call: Call) -> None:
        """See Weather."""
        super().struck(fault, call)
        self._process.faults.add(fault)
        self._process.tell(f"{call.verb} {call.key}: {fault}")


class Process(Silent):
    """One command's process. It is also the Progress of what it runs."""

    def __init__(self, world: RepositoryWorld, title: str, climate: Climate, skew: timedelta = NO_SKEW) -> None:
        self.world = world
        self.skew = skew
        self.title = title
        self.is_dead = False
        self.was_interrupted = False
        self.has_slept = False
        self.faults: set[Fault] = set()
        self.weather = ProcessWeather(self, climate)
        self.store: ObjectStore = FaultyStore(world.bucket, self.weather)
        self.attempt: Attempt | None = None
        self.began_at = world.schedule.steps

    def run(self, work: Callable[[Process], object]) -> str:
        """Run the command to its end and say what whoever ran it was told: "yes", "no", "unknown", or "" for nothing.

        Any other end than those of an operations tool (an error that is no SnapshotError) breaks a promise.
        """
        self.tell("begins")
        self.world.running = self
        told, how = "yes", "done"
        try:
            work(self)
        except KilledError:
            told, how = "", "killed"
        except CtrlCError:
            told, how = "", "interrupted"
        except SnapshotError as error:
            told = "unknown" if error.exit_code == INDETERMINATE else "no"
            how = f"{error.exit_code} {error.slug}: {error.message}"
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"errors: {self.title} ended by {type(error).__name__}: {error}") from error
        finally:
            if self.world.holder is self:
                self.world.holder = None
        if self.attempt:
            self.attempt.told, self.attempt.told_at = told, self.world.schedule.steps
        self.tell(how)
        self.world.tally[f"{self.title.split()[0]}: {how.split(':')[0]}"] += 1
        return told

    def tell(self, line: str) -> None:
        """Keep a line for the story of the history."""
        self.world.tell(f"{self.title}: {line}")

    def note(self, text: str) -> None:
        """See Progress."""
        self.tell(f"says: {text}")

    def sleep(self) -> None:
        """Be stopped for a while, as by SIGSTOP; its sessions may end meanwhile, and the lock with them."""
        world = self.world
        self.has_slept = True
        steps = 1 + world.below(PAUSE_STEPS_MAX)
        loses = world.holder is self and world.below(3) > 0
        self.tell(f"sleeps for {steps} calls" + (" and loses the lock" if loses else ""))
        world.tally["slept"] += 1
        if loses:
            world.holder = None
            world.tally["locks lost"] += 1
        world.schedule.pause(steps)
        world.schedule.step()

    def stand_aside(self, work: Callable[[], object]) -> None:
        """Be stopped while others do something, and lose the lock."""
        self.tell("is stopped, and its sessions end")
        if self.world.holder is self:
            self.world.holder = None
        work()
        self.tell("goes on")

    def ask_node(self, what: str) -> None:
        """One call to a node, which may fail as a call to the store does."""
        call = Call("node", what, tuple(fault for fault in ANY if fault not in NOT_ON_NODES))
        self.weather.before(call)
        fault = self.weather.fault(call)
        if fault is None:
            return
        self.weather.struck(fault, call)
        if fault is Fault.UNREACHABLE:
            raise NodeSilentError("node a: it does not answer")
        raise self.weather.end(fault)

    def drop_slots(self, slot: str) -> list[str]:
        """Drop a chain's slots; the nodes on which they are left."""
        try:
            self.ask_node(f"drop {slot}")
        except NodeSilentError:
            return ["a"]
        self.world.nodes.slots.pop(slot, None)
        self.tell(f"drops {slot}")
        return []


@dataclass(slots=True)
class ModelLock:
    """What the product's code asks of a FleetLock."""

    process: Process
    retaken: bool = False

    def check_held(self) -> None:
        """See FleetLock."""
        self.process.ask_node("check the lock")
        if self.process.world.holder is not self.process:
            raise FleetLockLostError("the fleet's lock was lost")

    def renew(self) -> None:
        """Take a lock that was lost again, where nobody has it now."""
        process, world = self.process, self.process.world
        process.ask_node("renew the lock")
        if world.holder is process:
            return
        if world.holder is not None:
            raise FleetBusyError("another operation is running")
        world.holder, self.retaken = process, True
        process.tell("takes the lock again")


@contextmanager
def exclusive(process: Process) -> Iterator[ModelLock]:
    """Hold the fleet, as snapshots.operations.exclusive does."""
    world = process.world
    process.ask_node("lock")
    if world.holder is not None:
        raise FleetBusyError("another operation is running")
    world.holder = process
    try:
        yield ModelLock(process)
    finally:
        if world.holder is process:
            world.holder = None
