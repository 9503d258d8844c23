"""A watch that hangs has its turn still: who waits for it, and who cancels it, are told so."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from msgspec import structs

from cutline.cli.output.node_status import read_nodes
from cutline.cli.watch.fleet_source import FleetSource
from cutline.cli.watch.turn import SilentWatch, SilentWatchError, take_turn
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.own_process import end_sessions_statement, own_label
from cutline.fleet.progress import Silent
from cutline.fleet.record import Time
from cutline.nodes.connections import connect
from cutline.nodes.lock import FleetBusyError
from cutline.snapshots.operations.cancelling import CancelResult, cancel_operations
from cutline.snapshots.operations.signs import store_sign
from cutline.snapshots.operations.under_way import WATCH, read_under_way
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.store_identity import ensure_identity
from cutline.storage.ids import new_operation_id
from cutline.storage.local import LocalStore
from tests.commands.snapshot_runs import configure_fleet
from tests.unit.document_kinds import SIGN


def say(*_: object, **__: object) -> None:
    """What is logged is not looked at."""


def test_a_watch_that_hangs_is_told_by_the_one_that_waits_and_is_not_forgotten(
    shared_fleet: EmbeddedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutline.snapshots.operations.cancelling.ANSWER_SECONDS_MAX", 0.0)
    fleet = configure_fleet(shared_fleet, tmp_path / "fleet.toml", f"file://{tmp_path}/store")
    store = LocalStore(tmp_path / "store")
    ensure_identity(store, fleet)
    now = datetime.now(UTC)
    source, sign = FleetSource(fleet.path, fleet, b"", b""), structs.replace(SIGN, kind=WATCH, by=own_label(WATCH))
    seen = {"alive": now, "hangs": now - timedelta(hours=1)}
    ids = {name: new_operation_id(now) for name in seen}

    def busy() -> FleetBusyError:
        with pytest.raises(FleetBusyError) as raised, take_turn(fleet, say):
            pass
        return raised.value

    with take_turn(fleet, say):
        store_sign(store, structs.replace(sign, operation=ids["alive"], seen_at=Time.of(now)), 1)
        assert SilentWatch().find(source, busy()) is None
        hanging = structs.replace(sign, operation=ids["hangs"], seen_at=Time.of(seen["hangs"]))
        store_sign(store, structs.replace(hanging, by="cutline watch ops@elsewhere:1"), 1)
        assert SilentWatch().find(source, busy()) is None
        store_sign(store, hanging, 2)
        # As in a container that was started again: the new process has the label of the one that is gone.
        assert SilentWatch().find(source, busy()) is None
        (gone,) = [one for one in read_under_way(store) if one.id == ids["hangs"]]
        store.delete(operation_key(ids["alive"], "sign-1"))
        found = SilentWatch().find(source, busy())
        assert isinstance(found, SilentWatchError)
        assert "holds the watch lock, but has shown no sign of life since" in found.message
        ends = end_sessions_statement(own_label(WATCH))
        assert ends in found.hint
        with connect(fleet.primaries[0]) as connection:
            ended = connection.execute(ends.replace("pg_terminate_backend(pid)", "pid")).fetchall()
        assert (found.details["session"],) in ended
        (first, *_) = read_nodes(fleet, store)
        assert any("watch lock held by watch by" in part for part in first.text.parts)
        assert first.to_json()["watch"]["session"] == found.details["session"]
        (one,) = read_under_way(store)[-1:]
        assert one.id == gone.id
        assert "its process may be hung and still holding the watch lock" in one.settled_by(now)
        (cancelled,) = cancel_operations(fleet, [one], 0.0, Silent())
        assert cancelled.result is CancelResult.STILL_RUNNING
        assert ends in cancelled.text
    (cancelled,) = cancel_operations(fleet, [one], 0.0, Silent())
    assert cancelled.result is CancelResult.SETTLED
