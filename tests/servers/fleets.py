"""Fleets whose shards run versions chosen by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cutline.embedded.fleet import EmbeddedFleet, is_fleet, start_fleet, stop_fleet
from tests.servers.installed import Server

# No test cuts the machine's power, so data that a server wrote survives the death of its process.
SETTINGS = {"fsync": "off"}
# Returns the fleet of a server that tests share; None is the wheel's server.
SharedFleets = Callable[[Server | None], EmbeddedFleet]


@contextmanager
def fleet_of(
    directory: Path,
    servers: Sequence[Server | None],
    *,
    backups: int = 0,
    schema: bool = True,
    settings: Mapping[str, str] | None = None,
) -> Iterator[EmbeddedFleet]:
    """Run a fleet with a shard per server, in order: s1, s2, …; None is the wheel's. Delete the fleet at the end."""
    programs = {f"s{number}": server.programs for number, server in enumerate(servers, 1) if server is not None}
    try:
        yield start_fleet(
            directory, shards=len(servers), backups=backups, schema=schema, programs=programs,
            settings=SETTINGS | dict(settings or {}),
        )  # fmt: skip
    finally:
        # A start that failed has already deleted the fleet.
        if is_fleet(directory):
            stop_fleet(directory, delete=True)
