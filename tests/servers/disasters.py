"""Disasters that befall the servers of an embedded fleet."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

from msgspec.structs import replace

from cutline.embedded.fleet import EmbeddedFleet
from cutline.embedded.server import (
    IMMEDIATE_STOP_SECONDS_MAX,
    EmbeddedNode,
    _children_left,
    create_primary,
    create_standby,
    delete_server,
    running_pid,
    start_server,
)
from cutline.nodes.programs import server_programs


def kill_server(node: EmbeddedNode) -> None:
    """Kill the server, as a power failure would, and wait until its last process has ended."""
    pid = running_pid(node)
    if pid is None:
        return
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + IMMEDIATE_STOP_SECONDS_MAX
    # The next start would fail while a child of the dead server is still attached to its shared memory.
    while running_pid(node) or _children_left(node.data_directory):
        assert time.monotonic() < deadline, f"node {node.id}: its server, process {pid}, did not end"
        time.sleep(0.02)


def rebuild_shard(fleet: EmbeddedFleet, primary: EmbeddedNode) -> None:
    """Replace a shard with new, empty servers: a primary without the bank's database, and its standbys."""
    standbys = fleet.backups_of(primary)
    for node in (*standbys, primary):
        delete_server(node)
    programs = server_programs()
    if primary.programs:
        programs = replace(programs, bin_directory=primary.programs)
    create_primary(programs, primary, {})
    start_server(programs, primary)
    for standby in standbys:
        create_standby(programs, standby, primary)
        start_server(programs, standby)
