"""The watch that hangs is the same one, whichever of its sessions is met."""

from __future__ import annotations

from typing import cast

import pytest

from cli.watch import silent_watch
from cli.watch.fleet_source import FleetSource
from cli.watch.silent_watch import SilentWatch, SilentWatchError
from storage.errors import BusyError


def busy(node: str, process: int) -> BusyError:
    details = {"user": "ops", "host": "db7", "process": process, "session": 4711, "node": node}
    return BusyError(f"node {node}: another operation is running", details=details)


def test_only_another_process_makes_it_another_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = cast(FleetSource, None), 0

    def find(_: FleetSource, error: BusyError) -> SilentWatchError:
        nonlocal asked
        asked += 1
        return SilentWatchError("it hangs", details=error.details)

    monkeypatch.setattr(silent_watch, "_find", find)
    looks = SilentWatch()
    first = looks.find(source, busy("s1", 7))
    assert first is not None
    assert looks.find(source, busy("s2", 7)) is first
    # It is not looked at again so soon.
    assert looks.find(source, busy("s2", 8)) is None
    assert asked == 1
