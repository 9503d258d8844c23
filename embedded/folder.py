"""The folder of an embedded fleet.

    DIR/demo.json    the servers and their folders; written before the first server is created
    DIR/fleet.toml   the fleet for the commands; lines that the user adds are kept
    DIR/store        the folder for its snapshots
    DIR/nodes/<id>/  data, log and socket of one server (in a different place if the server's account can't enter DIR;
                     only the socket is elsewhere if its path would be too long)

Nothing here starts or stops a server.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from cutline.embedded.server import FOLDER_BYTES_MAX, EmbeddedNode
from cutline.fleet.own_process import is_own, is_own_alone, real_path
from cutline.nodes.programs import can_enter, server_programs, shared_temporary_directory
from cutline.storage.errors import BusyError, RefusedError, UsageError

STATE = "demo.json"
DESCRIPTION = "fleet.toml"
STORE = "store"
NODES = "nodes"
DATABASE = "bank"
STATE_SCHEMA = "cutline/demo-state/1"
SHARDS_MAX = 32
BACKUPS_MAX = 8
SOCKET_LETTERS = 12


class FolderTakenError(RefusedError):
    """The folder contains other files, or a fleet that differs from the requested one."""


class EmbeddedFleetBusyError(BusyError):
    """Another process is starting or stopping this embedded fleet."""


class NodePlaces(Struct, frozen=True):
    """The folder of the servers' data, and the folder of their sockets if it is different."""

    nodes: Path
    sockets: Path | None = None

    def node(self, node_id: str, backup_of: str | None, programs: Path | None) -> EmbeddedNode:
        """Return the node with its folders in these places."""
        # An id alone may make the path of a socket too long.
        sockets = self.sockets / hashlib.sha256(node_id.encode()).hexdigest()[:SOCKET_LETTERS] if self.sockets else None
        return EmbeddedNode(node_id, self.nodes / node_id, backup_of, programs, sockets)

    def delete(self) -> None:
        """Delete the folders that exist; they are empty."""
        for folder in filter(None, (self.nodes, self.sockets)):
            if folder.exists():
                folder.rmdir()


class State(Struct, frozen=True):
    """The contents of demo.json: the servers, their folders, and whether all servers were created."""

    places: NodePlaces
    nodes: tuple[EmbeddedNode, ...]
    complete: bool


def read_state(directory: Path) -> State | None:
    """Read the fleet's state from `directory`; None if it contains no fleet.

    Raises FolderTakenError for a foreign file or path.
    """
    try:
        document = json.loads(_read_own(directory / STATE))
        sockets = document.get("sockets_directory")
        places = NodePlaces(Path(document["nodes_directory"]), Path(sockets) if sockets else None)
        nodes = tuple(
            places.node(entry["id"], entry["backup_of"], Path(entry["programs"]) if entry.get("programs") else None)
            for entry in document["nodes"]
        )
        if document["schema"] != STATE_SCHEMA:
            raise ValueError(document["schema"])
        return State(places, nodes, bool(document["complete"]))
    except FileNotFoundError:
        return None
    except OSError as error:
        # For example, one of the path's parents is a file.
        raise FolderTakenError(f"{directory}: {error.strerror}", hint="choose a different folder") from error
    except (ValueError, KeyError, TypeError) as error:
        raise FolderTakenError(
            f"{directory / STATE} was not written by this version of snapshot demo",
            hint="choose a different folder",
        ) from error


def _read_own(path: Path) -> str:
    """Read a file that only this user can have written: it names programs to run and folders to delete."""
    if not is_own_alone(path):
        raise _foreign(path.parent)
    refuse_foreign_folder(path.parent)
    return path.read_text()


def claim_folder(directory: Path) -> None:
    """Create the folder of a fleet if needed; raise FolderTakenError if it is another's, or can't contain a fleet."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        refuse_foreign_folder(directory)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        # For example, the file system is mounted read-only.
        raise FolderTakenError(f"{directory}: {error.strerror}", hint="choose a different folder") from error


def refuse_foreign_folder(directory: Path) -> None:
    """Raise FolderTakenError if another user owns the folder: they could add links that even root would follow."""
    if not is_own(real_path(directory)):
        raise _foreign(directory)


def _foreign(directory: Path) -> FolderTakenError:
    return FolderTakenError(
        f"{directory} belongs to another user, or contains another user's fleet",
        hint="choose a different folder, or run the command as its owner",
    )


def write_state(directory: Path, state: State) -> None:
    """Replace demo.json atomically."""
    document = {
        "schema": STATE_SCHEMA,
        "complete": state.complete,
        "nodes_directory": str(state.places.nodes),
        "sockets_directory": str(state.places.sockets) if state.places.sockets else None,
        "nodes": [_entry(node) for node in state.nodes],
    }
    _replace(directory / STATE, json.dumps(document, indent=2) + "\n")


def _entry(node: EmbeddedNode) -> dict[str, str | None]:
    entry = {"id": node.id, "backup_of": node.backup_of}
    return entry | ({"programs": str(node.programs)} if node.programs else {})


def describe(directory: Path, nodes: Sequence[EmbeddedNode]) -> None:
    """Write fleet.toml for these nodes."""
    # A JSON string is also a valid TOML basic string.
    quoted = {"name": '"demo"', "store": json.dumps(f"file://{directory / STORE}", ensure_ascii=False)}
    lines = [f"{key} = {value}" for key, value in quoted.items()]
    for node in nodes:
        lines += ["", "[[node]]", f'id = "{node.id}"']
        lines += [f'backup_of = "{node.backup_of}"'] if node.backup_of else []
        lines += [f'dsn = "{node.dsn(DATABASE)}"']
    _replace(directory / DESCRIPTION, "\n".join(lines) + "\n")


def shape_of(shards: int, backups: int) -> list[tuple[str, str | None]]:
    """Return each node's id and backup_of: s1, s2, …, then s1-b1, …; raise UsageError for impossible numbers."""
    if not (1 <= shards <= SHARDS_MAX and 0 <= backups <= BACKUPS_MAX):
        raise UsageError(
            f"an embedded fleet can't have {shards} shards with {backups} standbys each",
            hint=f"choose 1 to {SHARDS_MAX} shards and 0 to {BACKUPS_MAX} standbys",
        )
    primaries = [f"s{shard}" for shard in range(1, shards + 1)]
    standbys = [(f"{name}-b{number}", name) for name in primaries for number in range(1, backups + 1)]
    return [*((name, None) for name in primaries), *standbys]


def check_directory(directory: Path) -> Path:
    """Return the absolute, resolved path; raise UsageError if it can't be passed to PostgreSQL."""
    directory = real_path(directory)
    # pg_ctl passes the data directory to a shell, in double quotes.
    if re.search(r'["$`\\\n]', str(directory)):
        raise UsageError(
            f"{directory}: the path contains a double quote, $, `, backslash or newline",
            hint="choose a path without these characters",
        )
    return directory


def refuse_foreign_files(directory: Path) -> None:
    """Raise FolderTakenError if a new fleet would overwrite files that were not created by an embedded fleet."""
    for name in (DESCRIPTION, NODES):
        if os.path.lexists(directory / name):
            raise FolderTakenError(
                f"{directory / name} exists, but was not created by an embedded fleet",
                hint="choose a new or empty folder",
            )


def place_for_nodes(directory: Path, ids: Iterable[str]) -> NodePlaces:
    """Create the folder for the servers' data, in `directory` if their account can enter it.

    If the path of a socket in that folder would be too long, also create a folder for the sockets.
    """
    account = server_programs().account
    if account is None or can_enter(account, directory):
        nodes = directory / NODES
        nodes.mkdir(mode=0o700)
    else:
        nodes = _make_shared("cutline-nodes-")
    places = NodePlaces(nodes, None if _holds_sockets(nodes, ids) else _make_shared("cutline-sockets-"))
    if account:
        # The account only needs to traverse the folder, which a restrictive umask would prevent.
        for folder in filter(None, (places.nodes, places.sockets)):
            folder.chmod(0o711)
    return places


def _make_shared(prefix: str) -> Path:
    return Path(tempfile.mkdtemp(prefix=prefix, dir=shared_temporary_directory())).resolve()


def _holds_sockets(place: Path, ids: Iterable[str]) -> bool:
    """Whether the path of every node's socket is short enough and has no comma, which would separate two paths."""
    return all(len(os.fsencode(place / node)) <= FOLDER_BYTES_MAX for node in ids) and "," not in str(place)


@contextmanager
def lock_folder(directory: Path) -> Iterator[None]:
    """Lock the fleet in `directory` during the block; raise EmbeddedFleetBusyError if another process has locked it."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise EmbeddedFleetBusyError(
            f"another process is starting or stopping the fleet in {directory}", hint="wait until it has finished"
        ) from error
    finally:
        os.close(descriptor)


def _replace(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    draft.replace(path)
