"""Leave a restore unfinished, and end it in either way."""

from __future__ import annotations

import pytest

from cutline.fleet.progress import Silent
from cutline.nodes.connections import NodeUnreachableError
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet, resume_restore
from cutline.restore.targets.databases import RestoreCrashPoint
from cutline.restore.unfinished.undoing import AbandonReport, abandon_restore, preview_abandon
from tests.commands.snapshot_runs import Ready
from tests.commands.watching import Reached, Watching
from tests.integration.restoring.target_place import (
    NAME,
    Place,
)

REQUEST = RestoreRequest(NAME, replace=True)


def restore_left(
    place: Place, point: RestoreCrashPoint, count: int = 1, request: RestoreRequest = REQUEST
) -> NodeUnreachableError:
    """Restore until a node goes away at the point; return the error."""

    def then(reached: Reached) -> None:
        if (reached.point, reached.count) == (str(point), count):
            raise NodeUnreachableError("node s2: it is gone", hint="bring it back")

    with pytest.raises(NodeUnreachableError) as raised:
        restore_fleet(plan_restore(place.fleet, place.target, request), Ready(place.spark), Watching(then))
    return raised.value


def resume(place: Place) -> list[str]:
    """Resume the restore; return the points that it reached."""
    watching = Watching()
    resume_restore(place.fleet, place.target, RestoreRequest(NAME), Ready(place.spark), watching)
    return [one.point for one in watching.reached_points]


def abandon(place: Place) -> AbandonReport:
    """Undo the restore, as a dry run has said before, which has changed nothing."""
    before = place.databases()
    said, entered = preview_abandon(place.fleet, place.target, NAME, Silent())
    assert place.databases() == before
    confirmed: list[str] = []
    report = abandon_restore(place.fleet, place.target, NAME, confirmed.extend, Silent())
    assert confirmed == entered
    for name in ("put_back", "dropped", "emptied", "done", "opened", "slots_dropped"):
        assert sorted(getattr(said, name)) == sorted(getattr(report, name)), name
    assert sorted(said.operations) == sorted(report.operations)
    return report
