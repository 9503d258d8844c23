"""The warnings of `init` about what runs the servers, and about settings that could end a chain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from msgspec import structs

from cutline.fleet.config import Fleet, WatchTable
from cutline.nodes.managers import MARKS
from cutline.nodes.surroundings import Surroundings, find_warnings, unlimited_text
from tests.unit.made_fleets import new_fleet

PLAIN = Surroundings(
    database="shop",
    managers=(),
    level_is_pending=False,
    idle_timeout_seconds=0,
    wal_kept_bytes=-1,
    apply_delay_seconds=0.0,
    names_own_slots=False,
    has_failover_slots=False,
    waits_for_standbys=False,
    server_version=180004,
    wal_file_bytes=16 << 20,
)


@pytest.fixture
def fleet() -> Fleet:
    made = new_fleet()
    first = made.nodes[0]
    primary = replace(first, id="a", backup_of=None, dsn="host=a dbname=shop", retained_wal_bytes_max=1 << 30)
    return replace(made, nodes=(primary, replace(primary, id="b", backup_of="a", dsn="host=b dbname=shop")))


def warned(fleet: Fleet, **changed: object) -> list[str]:
    """The names of the warnings if the standby's server is like this, and the primary's is plain."""
    found = find_warnings(fleet, {"a": PLAIN, "b": structs.replace(PLAIN, **changed)})
    assert all(warning.nodes == ("b",) for warning in found)
    return [warning.name for warning in found]


def test_plain_servers_give_no_warning(fleet: Fleet) -> None:
    assert warned(fleet) == []


@pytest.mark.parametrize(
    ("field", "value", "name"),
    [
        *(("managers", (name,), name) for name, _ in MARKS),
        ("level_is_pending", True, "wal-level-pending"),
        ("apply_delay_seconds", 1200.0, "delayed-standby"),
        ("names_own_slots", True, "synchronized-standby-slots"),
        ("has_failover_slots", True, "failover-slot"),
        ("idle_timeout_seconds", 3600, "idle-slot-timeout"),
        ("wal_kept_bytes", 1 << 20, "slot-wal-limit"),
        ("wal_file_bytes", 2 << 30, "wal-segment-size"),
    ],
)
def test_each_has_its_own_warning(fleet: Fleet, field: str, value: object, name: str) -> None:
    assert warned(fleet, **{field: value}) == [name]


def test_failover_slots_are_told_from_those_that_nobody_wanted(fleet: Fleet) -> None:
    def warned_of_a(fleet: Fleet, **changed: object) -> list[str]:
        return [warning.name for warning in find_warnings(fleet, {"a": structs.replace(PLAIN, **changed)})]

    alone = replace(fleet, nodes=fleet.nodes[:1])
    wanted = replace(alone, failover_slots=True)
    assert warned_of_a(alone, has_failover_slots=True) == ["failover-slot"]
    assert warned_of_a(wanted, has_failover_slots=True) == []
    assert warned_of_a(wanted, server_version=170010) == ["failover-slots-unused"]
    assert warned_of_a(wanted, waits_for_standbys=True) == ["failover-slots-wait"]
    assert warned_of_a(alone, waits_for_standbys=True) == []
    assert warned_of_a(replace(fleet, failover_slots=True), waits_for_standbys=True) == ["failover-slots-unused"]


def test_servers_without_a_limit_on_slots_are_noted_in_one_line(fleet: Fleet) -> None:
    limited = structs.replace(PLAIN, wal_kept_bytes=1 << 40)
    assert unlimited_text(fleet, {"a": limited, "b": limited}) == ""
    assert "is not set on node b: " in unlimited_text(fleet, {"a": limited, "b": PLAIN})
    assert "is not set on all nodes: " in unlimited_text(fleet, {"a": PLAIN, "b": PLAIN})
    # A standby that is away was not asked.
    assert "is not set on node a: " in unlimited_text(fleet, {"a": PLAIN})


def test_limits_that_leave_enough_room_give_no_warning(fleet: Fleet) -> None:
    hourly = replace(fleet, watch=WatchTable(every=3600.0))
    assert warned(hourly, idle_timeout_seconds=2 * 3600) == ["idle-slot-timeout"]
    assert warned(hourly, idle_timeout_seconds=3 * 3600) == []
    assert warned(fleet, wal_kept_bytes=1 << 30) == []
    assert warned(fleet, apply_delay_seconds=fleet.standby_wait_seconds) == []


def test_the_entry_for_patroni_names_the_database(fleet: Fleet) -> None:
    (warning,) = find_warnings(fleet, {"a": structs.replace(PLAIN, managers=("patroni",)), "b": PLAIN})
    assert "ignore_slots: [{type: logical, plugin: pgoutput, database: shop}]" in warning.action
    assert warning.text.startswith("node a: ")
    assert warning.to_json().keys() == {"warning", "nodes", "message", "action"}
