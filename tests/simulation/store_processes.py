"""Simulated processes: each runs a command with the product's own code on the store, and on the nodes of the model.

Every process has its own FaultyStore. Before each of its calls other processes may run; it may be killed, interrupted,
or suspended, and lose the fleet's lock meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

from cutline.fleet.progress import Silent
from cutline.nodes.lock import FleetBusyError, FleetLockLostError
from cutline.storage.errors import SnapshotError, StoppedError
from cutline.storage.store import ObjectStore
from tests.simulation.faulty_store import FaultyStore
from tests.simulation.repository_model import CreateRun, NodeSilentError, RepositoryWorld
from tests.simulation.schedule import CtrlCError, KilledError
from tests.simulation.store_faults import COMMON_FAULTS, CREATE_FAULTS, Call, Fault, FaultSource

STORE_ONLY_FAULTS = (Fault.THROTTLED,)
PAUSE_STEPS_MAX = 150
# The faults that only these calls can meet are most of what they meet.
TYPICAL_FAULTS: Mapping[str, tuple[Fault, ...]] = {"list": (Fault.STALE,), "read": (Fault.TRUNCATED,)}
COMMIT_FAULTS = tuple(fault for fault in CREATE_FAULTS if fault not in COMMON_FAULTS)
TYPICAL_RATE = 0.7
COMMIT_KEY = re.compile(r"snapshots/[^/]+/(snapshot|increments/\d+)(\.\d+)?\.json")
# A suspension is most dangerous after the last check and before the commit is put.
COMMIT_PAUSE = 0.3
INDETERMINATE = 5
NO_SKEW = timedelta()


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often a fault meets any call, a listing, a data object, a commit's put; how often a call is suspended."""

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


NO_FAULTS = FaultRates()


class ProcessFaultSource(FaultSource):
    """Draws the faults of one process by `rates`, or takes them from `plan`, by the number of the call from 0.

    `suspension` is (n, work): `work` runs while the process is suspended before its n-th call. `calls` has all so far.
    """

    def __init__(self, process: Process, rates: FaultRates) -> None:
        super().__init__()
        self.tally = process.world.tally
        self._process = process
        self._rates = rates
        self.plan: Mapping[int, Fault] | None = None
        self.suspension: tuple[int, Callable[[], object]] | None = None
        self.kills_before_commit = False
        self.calls: list[Call] = []

    def before(self, call: Call) -> None:
        """Let other processes run; raise if this one was killed."""
        process, world = self._process, self._process.world
        if process.is_dead:
            raise KilledError
        world.schedule.step()
        if self._rates.pause and world.draw.random() < self._pause(call):
            process.suspend()
        if self.suspension and self.suspension[0] == len(self.calls):
            process.suspend_during(self.suspension[1])
        world.running = process
        self.calls.append(call)
        if call.verb == "create":
            world.note_mark(call.key, is_excused=process.breaks_pins or Fault.STALE in process.faults)

    def fault(self, call: Call) -> Fault | None:
        """See FaultSource."""
        if self.kills_before_commit and is_commit(call):
            return Fault.CRASH_BEFORE
        if self.plan is not None:
            fault = self.plan.get(len(self.calls) - 1)
            return fault if fault in call.possible else None
        if self._rates is NO_FAULTS:
            return None
        rate, draw = self._rates.rate(call), self._process.world.draw
        if not rate or draw.random() >= rate:
            return None
        usual = COMMIT_FAULTS if is_commit(call) else TYPICAL_FAULTS.get(call.verb, ())
        return draw.choice(usual if usual and draw.random() < TYPICAL_RATE else call.possible)

    def below(self, size: int) -> int:
        """See FaultSource."""
        return self._process.world.below(size)

    def _pause(self, call: Call) -> float:
        return COMMIT_PAUSE if is_commit(call) else self._rates.pause

    def exit_error(self, fault: Fault) -> BaseException:
        """After a crash the process can make no more calls; after an interrupt it can still clean up."""
        if fault in (Fault.INTERRUPT_BEFORE, Fault.INTERRUPT_AFTER):
            return CtrlCError()
        self._process.is_dead = True
        return KilledError()

    def record(self, fault: Fault, call: Call) -> None:
        """See FaultSource."""
        super().record(fault, call)
        self._process.faults.add(fault)
        self._process.log(f"{call.verb} {call.key}: {fault}")


class Process(Silent):
    """One command's process. It is also the Progress of what it runs."""

    def __init__(self, world: RepositoryWorld, title: str, rates: FaultRates, skew: timedelta = NO_SKEW) -> None:
        self.world = world
        self.skew = skew
        self.title = title
        self.is_dead = False
        self.breaks_pins = False
        self.keeps_lock = False
        self.faults: set[Fault] = set()
        self.fault_source = ProcessFaultSource(self, rates)
        self.store: ObjectStore = FaultyStore(world.bucket, self.fault_source)
        self.create_run: CreateRun | None = None
        self.began_at = world.schedule.steps

    def run(self, work: Callable[[Process], object]) -> str:
        """Run the command to its end; return whether it reported success: "yes", "no", "unknown", or "" for no report.

        Any other exception than a SnapshotError is a bug, and breaks a promise.
        """
        self.log("begins")
        self.world.running = self
        reported, how = "yes", "done"
        try:
            work(self)
        except KilledError:
            reported, how = "", "killed"
        except CtrlCError:
            reported, how = "", "interrupted"
        except StoppedError as error:
            # What it says of a create is a promise as any report.
            reported, how = "yes" if self.create_run and error.message.endswith("is committed") else "", "interrupted"
        except SnapshotError as error:
            reported = "unknown" if error.exit_code == INDETERMINATE else "no"
            how = f"{error.exit_code} {error.slug}: {error.message}"
        except AssertionError:
            raise
        except Exception as error:
            raise AssertionError(f"errors: {self.title} ended with {type(error).__name__}: {error}") from error
        finally:
            if self.world.holder is self:
                self.world.holder = None
        if self.create_run:
            self.create_run.reported, self.create_run.reported_at = reported, self.world.schedule.steps
        self.log(how)
        self.world.tally[f"{self.title.split()[0]}: {how.split(':')[0]}"] += 1
        return reported

    def log(self, line: str) -> None:
        """Add a line to the log of the history."""
        self.world.log(f"{self.title}: {line}")

    def note(self, text: str) -> None:
        """See Progress."""
        self.log(f"notes: {text}")

    def suspend(self) -> None:
        """Suspend the process for a while, as by SIGSTOP; its sessions may end meanwhile, and the lock with them."""
        world = self.world
        steps = 1 + world.below(PAUSE_STEPS_MAX)
        loses = world.holder is self and world.below(3) > 0
        self.log(f"is suspended for {steps} calls" + (" and loses the lock" if loses else ""))
        world.tally["suspended"] += 1
        if loses:
            world.holder = None
            world.tally["locks lost"] += 1
        world.schedule.pause(steps)
        world.schedule.step()

    def suspend_during(self, work: Callable[[], object]) -> None:
        """Suspend the process while `work` runs; it loses the lock, unless it `keeps_lock`."""
        self.log("is suspended" if self.keeps_lock else "is suspended, and its sessions end")
        if self.world.holder is self and not self.keeps_lock:
            self.world.holder = None
        work()
        self.log("continues")

    def ask_node(self, what: str) -> None:
        """Make one call to a node; it can fail like a call to the store."""
        call = Call("node", what, tuple(fault for fault in COMMON_FAULTS if fault not in STORE_ONLY_FAULTS))
        self.fault_source.before(call)
        fault = self.fault_source.fault(call)
        if fault is None:
            return
        self.fault_source.record(fault, call)
        if fault is Fault.UNREACHABLE:
            raise NodeSilentError("node a: it does not answer")
        raise self.fault_source.exit_error(fault)

    def drop_slots(self, slot: str) -> list[str]:
        """Drop a chain's slots; return the nodes where they could not be dropped."""
        try:
            self.ask_node(f"drop {slot}")
        except NodeSilentError:
            return ["a"]
        self.world.nodes.slots.pop(slot, None)
        self.log(f"drops {slot}")
        return []


@dataclass(slots=True)
class ModelLock:
    """The part of FleetLock that the simulated commands use."""

    process: Process
    retaken: bool = False

    def check_held(self) -> None:
        """See FleetLock."""
        self.process.ask_node("check the lock")
        if self.process.world.holder is not self.process:
            raise FleetLockLostError("the fleet's lock was lost")

    def renew(self) -> None:
        """Take a lost lock again, if nobody holds it."""
        process, world = self.process, self.process.world
        process.ask_node("renew the lock")
        if world.holder is process:
            return
        if world.holder is not None:
            raise FleetBusyError("another operation is running")
        world.holder, self.retaken = process, True
        process.log("takes the lock again")


@contextmanager
def exclusive(process: Process) -> Iterator[ModelLock]:
    """Hold the fleet, as snapshots.operations.operation.exclusive does."""
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
