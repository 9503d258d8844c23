"""What `status --nodes` says of a node that has given no answer to one of its two questions, or to both."""

from __future__ import annotations

import pytest

from cutline.cli.output.node_status import NodeStatus
from cutline.fleet.lsn import Lsn
from cutline.nodes.lock import LockAnswer
from cutline.wal.drain.lags import NodeLags

LATE, LATER = "no answer within 2 s", "no answer within 5 s"
AT = NodeLags("a", position=Lsn(0x50))


@pytest.mark.parametrize(
    ("lock", "lags", "state", "text"),
    [
        (LockAnswer("a"), AT, "free", "fleet lock free, at 0/50"),
        (LockAnswer("a"), NodeLags("a", LATE), "free", f"fleet lock free, WAL positions unknown: {LATE}"),
        (LockAnswer("a", problem=LATER), AT, None, f"fleet lock unknown: {LATER}, at 0/50"),
        (LockAnswer("a", problem=LATER), NodeLags("a", LATE), None, LATER),
        (None, NodeLags("a", LATE), None, LATE),
        (None, AT, None, "at 0/50"),
    ],
)
def test_only_what_is_known_is_said(lock: LockAnswer | None, lags: NodeLags, state: str | None, text: str) -> None:
    status = NodeStatus("a", "primary" if lock else "standby", lock, lags, None)
    assert list(status.text.lines(None)) == [f"node a: {text}"]
    assert (status.to_json()["lock"], status.to_json()["holder"]) == (state, None)
    assert (status.to_json()["problem"] is None) == (not lags.problem and not (lock and lock.problem))
