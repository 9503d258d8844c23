"""The servers of a drill: one embedded PostgreSQL for each shard, in a temporary folder, and what they lack.

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
from fleet.nodes.connections import MAINTENANCE_DATABASE, connect, with_database
from restore.build import read_shard_ddl
from restore.ddl.archive import ArchiveDdl
from restore.plan import RestorePlan
from restore.target import target_of
from storage.errors import RefusedError

DATABASE, EXTENSION = "drill", "EXTENSION"
# Nobody keeps what is in them.
SETTINGS: Mapping[str, str] = {"fsync": "off", "full_page_writes": "off", "synchronous_commit": "off"}
ELSEWHERE = "drill on servers of your own that have it: snapshot restore NAME --to FILE"


class DrillUnfitError(RefusedError):
    """The embedded servers can't hold the snapshot's databases."""


def without_servers(source: Fleet, shards: tuple[str, ...]) -> Fleet:
    """A fleet of these primaries whose servers are still to be made."""
    programs = source.nodes[0].programs
    return replace(source, nodes=tuple(Node(shard, f"dbname={DATABASE}", programs=programs) for shard in shards))


@contextmanager
def drill_servers(plan: RestorePlan) -> Iterator[RestorePlan]:
    """Make the servers of a plan whose target is `without_servers`; yield the plan into them.

    Raises DrillUnfitError, and what start_fleet raises.
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
        _check_fit(plan, folder)
        yield plan
    finally:
        if read_state(place) is not None:
            stop_fleet(place, delete=True)
        shutil.rmtree(folder, ignore_errors=True)


def _check_fit(plan: RestorePlan, folder: Path) -> None:
    """Raise DrillUnfitError if the servers are older than the snapshot's, or lack an extension."""
    store = plan.store.open()
    for target in plan.targets:
        with connect(with_database(target.node, MAINTENANCE_DATABASE)) as connection:
            ours = connection.info.server_version // 10000
            available = {name for (name,) in connection.execute("SELECT name FROM pg_available_extensions")}
        theirs = plan.chain.baseline[target.shard].server_version // 10000
        if ours < theirs:
            raise DrillUnfitError(
                f"the embedded servers have PostgreSQL {ours}, older than the {theirs} of shard {target.shard}",
                hint=ELSEWHERE,
                details={"shard": target.shard, "version": theirs, "embedded": ours},
            )
        ddl = read_shard_ddl(store, plan.chain, target.shard, folder / f"archive-{target.shard}")
        names = (
            {entry.name for entry in ddl.entries if entry.kind == EXTENSION} if isinstance(ddl, ArchiveDdl) else set()
        )
        if lacking := sorted(names - available):
            raise DrillUnfitError(
                f"the embedded servers lack extensions that shard {target.shard} has: {', '.join(lacking)}",
                hint=ELSEWHERE,
                details={"shard": target.shard, "extensions": lacking},
            )
