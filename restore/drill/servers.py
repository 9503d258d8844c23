"""The servers of a drill: one embedded PostgreSQL for each shard, in a temporary folder.

However the block ends, they are stopped and deleted. If the process is killed, the next command that uses temporary
files does it (cli/folders/session_folder.py), as long as the folder is below the command's own.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from embedded.fleet import start_fleet, stop_fleet
from embedded.folder import read_state
from fleet.config import Fleet, Node
from restore.obstacles.obstacles import ObstaclesError, TargetLacksError
from restore.plan import RestorePlan
from restore.targets.target import TargetUnfitError, target_of
from storage.errors import RefusedError

DATABASE = "drill"
# Nobody keeps what is in them.
SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
ELSEWHERE = "drill on servers of your own: snapshot restore NAME --to FILE"


class DrillUnfitError(RefusedError):
    """The embedded servers can't hold the snapshot's databases."""


def without_servers(source: Fleet, shards: tuple[str, ...]) -> Fleet:
    """A fleet of these primaries whose servers are still to be made."""
    programs = source.nodes[0].programs
    return replace(source, nodes=tuple(Node(shard, f"dbname={DATABASE}", programs=programs) for shard in shards))


@contextmanager
def drill_servers(plan: RestorePlan) -> Iterator[RestorePlan]:
    """Make the servers of a plan whose target is `without_servers`; yield the plan into them.

    Raises what start_fleet raises.
    """
    folder = Path(tempfile.mkdtemp(prefix="cutline-drill-"))
    place = folder / "fleet"
    try:
        made = start_fleet(place, shards=len(plan.targets), backups=0, settings=SETTINGS, schema=False)
        nodes = tuple(
            replace(target.node, dsn=server.dsn(DATABASE))
            for target, server in zip(plan.targets, made.primaries, strict=True)
        )
        targets = tuple(target_of(node.id, node, (), plan.intent.id) for node in nodes)
        plan = replace(plan, target_fleet=replace(plan.target_fleet, nodes=nodes), targets=targets)
        yield plan
    finally:
        if read_state(place) is not None:
            stop_fleet(place, delete=True)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def naming_unfit() -> Iterator[None]:
    """Raise DrillUnfitError if a restore in the block is refused for what the servers are or lack."""
    try:
        yield
    except (TargetUnfitError, TargetLacksError, ObstaclesError) as error:
        raise DrillUnfitError(
            f"the embedded servers can't hold the snapshot: {error.message}", hint=ELSEWHERE, details=error.details
        ) from error
