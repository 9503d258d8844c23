"""A test that leaves a shared server stopped is blamed, and the server runs again for the next test."""

from __future__ import annotations

import os
import signal
import time
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import running_pid
from tests.integration.conftest import RUNNING, SHARED, FleetFactory, check_left_running
from tests.integration.left_on_servers import is_stopped
from tests.servers.disasters import kill_server


def config_of(fleet: EmbeddedFleet) -> Any:
    config = SimpleNamespace(stash=pytest.Stash())
    config.stash[RUNNING], config.stash[SHARED] = [fleet], [fleet]
    return config


def answers(fleet: EmbeddedFleet) -> bool:
    with psycopg.connect(fleet.dsns()[0], connect_timeout=10) as connection:
        return connection.execute("SELECT 1").fetchone() == (1,)


def test_who_leaves_it_stopped_or_killed_is_named_and_it_runs_again(fleet_factory: FleetFactory) -> None:
    fleet = fleet_factory()
    config, node = config_of(fleet), fleet.primaries[0]
    check_left_running(config, "test_before")
    kill_server(node)
    with pytest.raises(AssertionError, match=r"^test_killing left servers that others use: \S+ s1 was not running"):
        check_left_running(config, "test_killing")
    assert answers(fleet)
    pid = running_pid(node) or 0
    os.kill(pid, signal.SIGSTOP)
    while not is_stopped(pid):
        time.sleep(0.01)
    with pytest.raises(AssertionError, match=r"^test_stopping left .* s1 was stopped by a signal"):
        check_left_running(config, "test_stopping")
    assert answers(fleet)
    check_left_running(config, "test_after")


def test_one_that_is_gone_is_given_up_and_others_are_not_blamed(fleet_factory: FleetFactory) -> None:
    fleet = fleet_factory()
    config = config_of(fleet)
    kill_server(fleet.primaries[0])
    fleet.delete_node_data(fleet.primaries[0])
    with pytest.raises(AssertionError, match=r"test_deleting left .* can't be used any more"):
        check_left_running(config, "test_deleting")
    assert config.stash[SHARED] == config.stash[RUNNING] == []
    check_left_running(config, "test_after")
