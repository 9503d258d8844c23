"""The statements of an archive's entries, as pg_restore writes them.

pg_restore connects to no server: it writes one script, in which marks divide the entries. So statements run in
Cutline's own sessions, whatever version, encryption and credentials the target has, and each belongs to an entry.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from cutline.fleet.nodes.encodings import raw_text
from cutline.fleet.programs.clients import ClientPrograms
from cutline.fleet.programs.wheel import run_tool
from cutline.restore.ddl.role_statements import DEFAULT_PRIVILEGES
from cutline.snapshots.ddl.archive import PRIVILEGES, ArchiveEntry, Contents, NewEntry, extract

MARK = "CUTLINE MARK"
# pg_restore writes privileges after all other entries, and event triggers after these (pg_backup_archiver.c,
# _tocEntryRestorePass). The mark of such an entry has its kind, so that it stays before it.
EVENT_TRIGGER = "EVENT TRIGGER"
REMARKS = ("COMMENT", "SECURITY LABEL")


class WrittenDdl(NamedTuple):
    """What pg_restore writes of an archive: the settings at its beginning, and statements by the entry's number."""

    settings: str
    statements: Mapping[int, str]


def write_statements(
    body: bytes, contents: Contents, entries: Iterable[ArchiveEntry], folder: Path, programs: ClientPrograms
) -> WrittenDdl:
    """Write the statements of the entries, as raw text; `folder` is private. Raises ProgramFailedError."""
    entries, token = list(entries), secrets.token_hex(16)
    marked: list[ArchiveEntry | NewEntry] = []
    for entry in entries:
        marked += [NewEntry(_mark_kind(entry), token, f"-- {token} {entry.number}\n"), entry]
    archive, script = folder / f"{token}.archive", folder / f"{token}.sql"
    try:
        archive.write_bytes(extract(body, contents, marked))
        run_tool(
            "pg_restore", f"--file={script}", str(archive),
            # Older ones write no lines for psql's restrict mode.
            *([f"--restrict-key={token}"] if programs.has("--restrict-key") else []), folder=programs.folder,
        )  # fmt: skip
        text = raw_text(script.read_bytes())
    finally:
        archive.unlink(missing_ok=True)
        script.unlink(missing_ok=True)
    text = "\n".join(line for line in text.split("\n") if line not in (f"\\restrict {token}", f"\\unrestrict {token}"))
    # A mark with the comment that pg_restore writes before every entry.
    mark = re.compile(rf"(?:--\n-- Name: {token};[^\n]*\n--\n\n)?-- {token} ([0-9]+)\n")
    settings, *rest = mark.split(text)
    return WrittenDdl(settings, dict(zip(map(int, rest[::2]), rest[1::2], strict=True)))


def is_of_event_trigger(entry: ArchiveEntry) -> bool:
    """Whether the entry is an event trigger, or a remark on one."""
    return entry.kind == EVENT_TRIGGER or (
        entry.kind in REMARKS and not entry.schema and entry.name.startswith(f"{EVENT_TRIGGER} ")
    )


def _mark_kind(entry: ArchiveEntry) -> str:
    if is_of_event_trigger(entry):
        return EVENT_TRIGGER
    return entry.kind if entry.kind in (PRIVILEGES, DEFAULT_PRIVILEGES) else MARK
