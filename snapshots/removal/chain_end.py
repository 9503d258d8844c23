"""End a chain and keep its restore points: `snapshot end`, and the chains that a watch replaces.

The chain is first marked in the store, and then its slots are dropped. If the command dies in between, `list` shows the
chain as ended, and the next create drops its slots (snapshots/operations/slot_guard.py); so does a repeated `end`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct, field

from cutline.fleet.config import Fleet
from cutline.fleet.own_process import own_label
from cutline.fleet.progress import News, Progress
from cutline.nodes.sessions import open_sessions
from cutline.snapshots.operations.operation import current_time, exclusive
from cutline.snapshots.operations.retired_nodes import with_retired
from cutline.snapshots.records.chain import Chain
from cutline.snapshots.records.end_marks import ChainMarks, EndMark, mark_end, read_end, read_marks
from cutline.snapshots.records.proven_chains import check_has_rows, read_newest_part
from cutline.snapshots.records.store_identity import check_of_fleet, read_identity
from cutline.storage.store import ObjectStore
from cutline.wal.drain.lags import Retained, RetainedAnswers, RetainedQuery
from cutline.wal.drain.slots import drop_slots, slot_name, slot_problem

NO_CHAIN = "a restore point without rows has no chain; to delete it: snapshot delete NAME"
COMMAND = "end"


class EndPlan(Struct, frozen=True):
    """What `snapshot end` does: the chain's last increment, its slot, and the WAL that nodes retain for it.

    `unanswered` are the nodes that did not answer, each with the reason. `marks` say whether the chain has ended
    before.
    """

    snapshot: str
    last: int
    slot: str
    retained: tuple[Retained, ...]
    unanswered: Mapping[str, str]
    marks: ChainMarks


class EndResult(Struct, frozen=True):
    """The mark of the chain; None if its increments were pruned before. `left` are nodes where slots may remain."""

    plan: EndPlan
    mark: EndMark | None
    left: list[str] = field(default_factory=list)


def preview_end(fleet: Fleet, name: str) -> EndPlan:
    """Return what `end_chain` would do. Raises the errors of reading a chain."""
    store = fleet.store.open()
    query = RetainedQuery(fleet)
    return _plan(store, _read(store, fleet, name), query.answers())


def end_chain(fleet: Fleet, name: str, progress: Progress, announce: Callable[[EndPlan], None]) -> EndResult:
    """Mark the snapshot's chain as ended, and drop its slots on every node that can be reached. Safe to repeat.

    `announce` gets the plan under the lock, before anything is changed, and may raise. The restore points stay.
    Primaries that can't be reached are left out, as long as most can be. Raises FleetBusyError, MajorityMissingError,
    and the errors of reading a chain.
    """
    store = fleet.store.open()
    _read(store, fleet, name)
    progress.step("check nodes")
    away: dict[str, str] = {}
    with (
        open_sessions(fleet, fleet.primaries, needs_all=True, away=away) as sessions,
        exclusive(sessions, store, COMMAND, name),
    ):
        chain = _read(store, fleet, name)
        plan = _plan(store, chain, RetainedQuery(fleet).answers())
        announce(plan)
        mark = None
        if not plan.marks.is_only_full:
            problems = _problems(chain, plan.slot, plan.retained, plan.unanswered)
            mark = _mark(store, chain, own_label(COMMAND, name), "", problems)
        progress.step("drop slots")
        nodes = with_retired(sessions, chain.listed_system_identifiers)
        return EndResult(plan, mark, drop_slots(nodes, plan.slot))


def supersede(fleet: Fleet, name: str, successor: str, progress: Progress) -> list[str]:
    """Mark the snapshot's chain as ended, then drop its slots; return the nodes on which slots may remain.

    If a slot was already lost, the mark records the problem. The chain's restore points stay. The next create drops
    any remaining slots. Raises FleetBusyError, and the errors of reading a chain.
    """
    store = fleet.store.open()
    identity = read_identity(store, fleet)
    with open_sessions(fleet, fleet.primaries) as sessions, exclusive(sessions, store, "watch", name):
        chain = read_newest_part(store, name)
        check_of_fleet(chain, identity)
        answers, slot = RetainedQuery(fleet).answers(), slot_name(chain.full.operation)
        listed = {node.listed_id for node in sessions.fleet.nodes}
        problems = [
            (node, problem)
            for node, problem in _problems(chain, slot, answers.of_slot(slot), answers.unanswered)
            if node in listed
        ]
        _mark(store, chain, "", successor, problems)
        progress.note(News(f"{name} will get no more increments: {successor} has taken its place"))
        return drop_slots(with_retired(sessions, chain.listed_system_identifiers), slot)


def _read(store: ObjectStore, fleet: Fleet, name: str) -> Chain:
    chain = read_newest_part(store, name)
    check_of_fleet(chain, read_identity(store, fleet))
    check_has_rows(chain, NO_CHAIN)
    return chain


def _plan(store: ObjectStore, chain: Chain, answers: RetainedAnswers) -> EndPlan:
    slot = slot_name(chain.full.operation)
    marks = read_marks(store, chain.name, chain.full.chain)
    return EndPlan(chain.name, chain.last.increment, slot, answers.of_slot(slot), answers.unanswered, marks)


def _problems(
    chain: Chain, slot: str, retained: tuple[Retained, ...], unanswered: Mapping[str, str]
) -> list[tuple[str, str]]:
    """Return the primaries that have answered and have a problem with the chain's slot, each with the problem."""
    found = {one.node: one.problem for one in retained}
    primaries = [node for node in map(chain.listed_id, chain.primaries) if node not in unanswered]
    problems = [(node, found.get(node, slot_problem(slot, None))) for node in primaries]
    return [(node, problem) for node, problem in problems if problem]


def _mark(
    store: ObjectStore, chain: Chain, ended_by: str, successor: str, problems: list[tuple[str, str]]
) -> EndMark | None:
    """Mark the chain as ended, and return the mark, which may be an earlier one."""
    node, problem = problems[0] if problems else ("", "")
    mark_end(
        store,
        EndMark(
            chain.name,
            chain.full.chain,
            chain.last.increment,
            node,
            current_time(),
            successor=successor,
            slot_problem=problem,
            ended_by=ended_by,
        ),
    )
    return read_end(store, chain.name, chain.full.chain)
