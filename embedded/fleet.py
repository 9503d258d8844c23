"""A real fleet on this machine (primaries with physical standbys), for trying the commands and for tests.

Only one process at a time can start or stop a fleet. If a fleet can't be created, its servers are stopped and deleted.
Only the user who created the fleet, root, and the account that runs its servers can connect.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

import psycopg
from msgspec import Struct
from msgspec.structs import replace

from cutline.embedded.bank import create_bank
from cutline.embedded.folder import (
    DATABASE,
    DESCRIPTION,
    STATE,
    STORE,
    FolderTakenError,
    NodePlaces,
    State,
    check_directory,
    claim_folder,
    describe,
    lock_folder,
    place_for_nodes,
    read_state,
    refuse_foreign_files,
    shape_of,
    write_state,
)
from cutline.embedded.server import (
    EmbeddedNode,
    create_primary,
    create_standby,
    delete_server,
    running_pid,
    start_server,
    stop_server,
)
from cutline.fleet.own_process import real_path
from cutline.nodes.programs import Programs, server_programs
from cutline.nodes.sessions import in_parallel
from cutline.storage.errors import RefusedError
from cutline.storage.folders import make_folder


class NoFleetError(RefusedError):
    """The folder contains no embedded fleet."""


class EmbeddedFleet(Struct, frozen=True):
    """The servers in a fleet folder, running or not."""

    directory: Path
    places: NodePlaces
    nodes: tuple[EmbeddedNode, ...]

    @property
    def fleet_toml(self) -> Path:
        """The path of fleet.toml, for the commands' `--fleet` option."""
        return self.directory / DESCRIPTION

    @property
    def store(self) -> Path:
        """The folder that fleet.toml names as the store."""
        return self.directory / STORE

    @property
    def primaries(self) -> tuple[EmbeddedNode, ...]:
        """The primary of every shard, in order."""
        return tuple(node for node in self.nodes if node.backup_of is None)

    def backups_of(self, primary: EmbeddedNode) -> tuple[EmbeddedNode, ...]:
        """Return the standbys of `primary`."""
        return tuple(node for node in self.nodes if node.backup_of == primary.id)

    def node(self, node_id: str) -> EmbeddedNode:
        """Return the node with this id; raise KeyError if there is none."""
        return {node.id: node for node in self.nodes}[node_id]

    def dsns(self, database: str = DATABASE) -> list[str]:
        """Return the connection strings of all primaries, in order."""
        return [node.dsn(database) for node in self.primaries]

    def running(self) -> tuple[EmbeddedNode, ...]:
        """Return the nodes whose servers are running."""
        return tuple(node for node in self.nodes if running_pid(node) is not None)

    def start_node(self, node: EmbeddedNode) -> None:
        """Start the node's server, unless it is running."""
        if running_pid(node) is None:
            start_server(self._programs(node), node)

    def delete_node_data(self, node: EmbeddedNode) -> None:
        """Simulate a disaster: stop the node's server immediately and delete its data."""
        delete_server(node)

    def _programs(self, node: EmbeddedNode) -> Programs:
        # The owner of the data must run the server, although root might choose a different account now.
        folders = [*(other.folder for other in self.nodes), self.places.nodes]
        owners = [folder.stat().st_uid for folder in folders if folder.exists()]
        programs = server_programs(next((owner for owner in owners if owner), None))
        return replace(programs, bin_directory=node.programs) if node.programs else programs


def start_fleet(
    directory: Path,
    *,
    shards: int,
    backups: int,
    settings: Mapping[str, str] | None = None,
    schema: bool = True,
    programs: Mapping[str, Path] | None = None,
) -> EmbeddedFleet:
    """Create and start a fleet in `directory`, or start the existing fleet; return it with all servers running.

    A new fleet has the database `bank` with its tables and accounts on every shard. Without `schema` it lacks that
    database, so a restore can create it. `settings` are PostgreSQL settings for new servers. `programs` maps primaries'
    ids to program folders, for shards whose PostgreSQL version differs from the wheel's. In an existing fleet, the
    servers that are down are started. On an error or interrupt, the servers that this call started are stopped, and the
    servers that it created are deleted. Raises FolderTakenError, EmbeddedFleetBusyError or ServerFailedError.
    """
    shape = shape_of(shards, backups)
    directory = check_directory(directory)
    claim_folder(directory)
    with lock_folder(directory):
        if not is_fleet(directory):
            return _new_fleet(directory, shape, (settings or {}, programs or {}), schema=schema)
        fleet = open_fleet(directory)
        if shape != [(node.id, node.backup_of) for node in fleet.nodes]:
            raise FolderTakenError(
                f"{directory} contains a fleet with different nodes: {', '.join(node.id for node in fleet.nodes)}",
                hint="use the same numbers of shards and standbys, or first run: snapshot demo down"
                f" {shlex.quote(str(directory))} --delete",
            )
        return _resume(fleet)


def programs_of(shards: int, folder: Path | None) -> dict[str, Path]:
    """Return the `programs` argument for a fleet that runs the programs in `folder`, or the wheel's if it is None."""
    return {shard: folder for shard, backup_of in shape_of(shards, 0) if backup_of is None} if folder else {}


def is_fleet(directory: Path) -> bool:
    """Whether `directory` contains a complete embedded fleet, running or not."""
    state = read_state(directory)
    return state is not None and state.complete


def open_fleet(directory: Path) -> EmbeddedFleet:
    """Return the fleet in `directory` without starting it; raise NoFleetError if there is none."""
    directory = real_path(directory)
    state = read_state(directory)
    if state is None:
        raise NoFleetError(
            f"{directory} contains no embedded fleet",
            hint=f"create a fleet: snapshot demo up {shlex.quote(str(directory))}",
        )
    return EmbeddedFleet(directory, state.places, state.nodes)


def stop_fleet(directory: Path, *, delete: bool = False) -> int:
    """Stop only this fleet's servers, standbys first; return how many were running.

    With `delete`, also delete their data and logs, demo.json and fleet.toml; the store is kept unless it is empty.
    """
    fleet = open_fleet(directory)
    with lock_folder(fleet.directory):
        stopped = _stop(fleet, immediate=delete)
        if delete:
            _delete(fleet)
    return stopped


def _new_fleet(
    directory: Path,
    shape: list[tuple[str, str | None]],
    how: tuple[Mapping[str, str], Mapping[str, Path]],
    *,
    schema: bool,
) -> EmbeddedFleet:
    if read_state(directory) is not None:
        # A process died while it was creating this fleet.
        _delete(open_fleet(directory))
    refuse_foreign_files(directory)
    places = place_for_nodes(directory, [node_id for node_id, _ in shape])
    settings, programs = how
    nodes = tuple(places.node(node_id, backup_of, programs.get(backup_of or node_id)) for node_id, backup_of in shape)
    fleet = EmbeddedFleet(directory, places, nodes)
    try:
        _record(fleet, complete=False)
        in_parallel(lambda primary: _make_shard(fleet, primary, settings, schema=schema), fleet.primaries)
        make_folder(fleet.store)
        describe(fleet.directory, fleet.nodes)
        _record(fleet, complete=True)
    except BaseException:
        _delete(fleet)
        raise
    return fleet


def _make_shard(fleet: EmbeddedFleet, primary: EmbeddedNode, settings: Mapping[str, str], *, schema: bool) -> None:
    programs = fleet._programs(primary)
    create_primary(programs, primary, settings)
    start_server(programs, primary)
    if schema:
        with psycopg.connect(primary.dsn("postgres"), autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {DATABASE}")
        create_bank(primary.dsn(), shard=fleet.primaries.index(primary))
    for backup in fleet.backups_of(primary):
        create_standby(programs, backup, primary)
        start_server(programs, backup)


def _resume(fleet: EmbeddedFleet) -> EmbeddedFleet:
    down = [node for node in fleet.nodes if running_pid(node) is None]
    if not down:
        return fleet
    lost = [node.id for node in down if not node.data_directory.exists()]
    if lost:
        directory = shlex.quote(str(fleet.directory))
        raise RefusedError(
            f"the data of {', '.join(lost)} is missing",
            hint=f"create a new fleet: snapshot demo down {directory} --delete, then snapshot demo up {directory}",
        )
    groups = _primaries_first(down)
    try:
        for group in groups:
            in_parallel(fleet.start_node, group)
    except BaseException:
        for group in reversed(groups):
            in_parallel(stop_server, group)
        raise
    return fleet


def _stop(fleet: EmbeddedFleet, *, immediate: bool) -> int:
    # In a fast shutdown a primary waits until its standbys have received all of its WAL, so stop the standbys first.
    return sum(
        sum(in_parallel(lambda node: stop_server(node, immediate=immediate), group))
        for group in reversed(_primaries_first(fleet.nodes))
    )


def _delete(fleet: EmbeddedFleet) -> None:
    in_parallel(delete_server, fleet.nodes)
    fleet.places.delete()
    fleet.fleet_toml.unlink(missing_ok=True)
    if fleet.store.exists() and not any(fleet.store.iterdir()):
        fleet.store.rmdir()
    (fleet.directory / STATE).unlink(missing_ok=True)


def _record(fleet: EmbeddedFleet, *, complete: bool) -> None:
    write_state(fleet.directory, State(fleet.places, fleet.nodes, complete))


def _primaries_first(nodes: Iterable[EmbeddedNode]) -> list[list[EmbeddedNode]]:
    ordered = list(nodes)
    return [[node for node in ordered if not node.backup_of], [node for node in ordered if node.backup_of]]
