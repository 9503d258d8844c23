"""`snapshot restore-abandon` and `snapshot restore-discard`: undo a restore, and drop the databases it set aside."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from msgspec.structs import asdict

from cutline.cli.output.arguments import DryRun, Nodes, RestoredTo, SnapshotName, command_context
from cutline.cli.output.confirmation import Yes, require_confirmation
from cutline.cli.output.hooks import with_hooks
from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.tables import size_text
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.messages import SAME_TARGET
from cutline.fleet.record import to_builtins
from cutline.nodes.other_databases import OldDatabase
from cutline.restore.targets.target import with_current_servers
from cutline.restore.unfinished.undoing import (
    AbandonReport,
    abandon_restore,
    discard_old,
    find_old,
    preview_abandon,
)
from cutline.snapshots.listing.name_templates import newest_name
from cutline.storage.errors import SnapshotError

NO_TARGET_HINT = "--to names the file that describes the target; docs/fleet-file.md lists every key"
# Matches a command that already names its target.
ELSEWHERE = re.compile(r" --to\b")
WORD = r"""(?:'[^']*'|"[^"]*"|[^\s;'"])+"""
# Matches a command in a hint. It ends before `; and …`, or before three spaces and `or: …`.
RESTORE_COMMAND = re.compile(rf"snapshot (?:restore(?:-[a-z]+)?|drill)(?: {WORD})*(?=;|$| {{3}})")
# Matches commands that lack a snapshot's name: hints from executors, for example about refused rows, say NAME.
UNNAMED = re.compile(r"(snapshot (?:restore(?:-[a-z]+)?|drill|show|check) )NAME\b")
ABANDON_SCHEMA, DISCARD_SCHEMA = "cutline/restore-abandon/1", "cutline/restore-discard/1"
# For each field of the report: the line that the command prints, and the line that a dry run prints.
ABANDON_LINES = {
    "operations": ("restore {} is undone", "restore {} would be undone"),
    "done": (
        "restore {} had decided to publish, and nothing was left to do: it was recorded as done",
        "restore {} has decided to publish, and nothing is left to do: it would be recorded as done",
    ),
    "put_back": (
        "previous database has its name back on {}",
        "previous database would get its name back on {}",
    ),
    "dropped": ("dropped on {}", "to drop on {}"),
    "slots_dropped": (
        "slot dropped with its database, which ends its chain: {}",
        "slot to drop with its database, which ends its chain: {}",
    ),
    "emptied": ("emptied on {}", "to empty on {}"),
    "opened": ("{} accepts connections again", "{} would accept connections again"),
}
NOT_CHANGED, NOTHING_ASIDE = "nothing was changed", "no database was set aside"


def load_target(to: Path | None, source: Fleet, nodes: Iterable[str] = ()) -> Fleet:
    """Load the fleet that --to names; without --to, return the source itself, with its servers in their current roles.

    Another file is taken as it is written. `nodes` are the shards that the command is limited to, if any.

    Raises FleetTopologyError if two servers of one of the source's shards accept writes.
    """
    target = load_fleet(to, hint=NO_TARGET_HINT) if to else source
    return with_current_servers(target, nodes) if target.path.samefile(source.path) else target


@contextmanager
def naming_target(to: Path | None, name: str = "NAME") -> Iterator[None]:
    """Fill in the snapshot's name and the target, as given, in an error's hint."""
    try:
        yield
    except SnapshotError as error:
        hint = UNNAMED.sub(lambda found: f"{found[1]}{name}", error.hint)
        error.hint = "\n".join(name_target(line, to) for line in hint.split("\n") if line != SAME_TARGET)
        raise


def name_target(line: str, to: Path | None) -> str:
    """Add the target to every restore command in a line of a hint, except commands that name a target."""
    given = f" --to {shlex.quote(str(to))}" if to else ""
    return RESTORE_COMMAND.sub(lambda found: found[0] if ELSEWHERE.search(found[0]) else f"{found[0]}{given}", line)


def restore_abandon(
    context: typer.Context,
    name: SnapshotName,
    *,
    to: RestoredTo = None,
    node: Nodes = None,
    yes: Yes = False,
    dry_run: DryRun = False,
) -> None:
    """Undo an interrupted restore of this snapshot.

    Databases and rows that it restored are removed, and the previous databases get their names back.
    """
    confirmation = require_confirmation(context, "restore-abandon", yes=yes or dry_run)
    source, nodes = command_context(context).load_fleet(), tuple(node or ())
    target, name = load_target(to, source, nodes), newest_name(source, name)
    with naming_target(to, name):
        if dry_run or not confirmation.is_given:
            with progress(context) as shown:
                report, entered = preview_abandon(source, target, name, shown, nodes)
            lines = [*_abandon_lines(report, is_done=False), *entered]
            if dry_run:
                document = _abandon_document(report) | {"dry_run": True, "to_confirm": entered}
                answer(context, document, [*lines, NOT_CHANGED])
                return
            confirmation.ask(lines, f"undo the restore of {name}?", losses=entered)
        with with_hooks(context, source, "restore-abandon", name):
            with progress(context) as shown:
                report = abandon_restore(source, target, name, confirmation.check, shown, nodes)
            emit(context, _abandon_document(report) | {"dry_run": False}, _abandon_lines(report, is_done=True))


def restore_discard(
    context: typer.Context, *, to: RestoredTo = None, node: Nodes = None, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Drop the databases that `restore --replace` set aside, no matter which snapshot was restored in their place."""
    confirmation = require_confirmation(context, "restore-discard", yes=yes or dry_run)
    source, nodes = command_context(context).load_fleet(), tuple(node or ())
    target = load_target(to, source, nodes)
    with naming_target(to):
        if dry_run or not confirmation.is_given:
            with progress(context) as shown:
                old = find_old(source, target, shown, nodes)
            lines = [f"to drop: {old_text(one)}" for one in old] or [NOTHING_ASIDE]
            if dry_run or not old:
                answer(context, _discard_document(old, is_dry=dry_run), [*lines, *[NOT_CHANGED] * bool(old)])
                return
            confirmation.ask(lines, "permanently drop these databases?", losses=_names_of(old))
        with with_hooks(context, source, "restore-discard"):
            with progress(context) as shown:
                old = discard_old(source, target, lambda found: confirmation.check(_names_of(found)), shown, nodes)
            lines = [f"dropped: {old_text(one)}" for one in old] or [NOTHING_ASIDE]
            emit(context, _discard_document(old, is_dry=False), lines)


def _discard_document(old: list[OldDatabase], *, is_dry: bool) -> dict[str, object]:
    return {"schema": DISCARD_SCHEMA, "discarded": [asdict(database) for database in old], "dry_run": is_dry}


def _names_of(old: list[OldDatabase]) -> list[str]:
    return [f"{database.node}: {database.database}{_slots_text(database)}" for database in old]


def _slots_text(old: OldDatabase) -> str:
    return f", with the logical slots of others in it: {', '.join(old.slots)}" if old.slots else ""


def _abandon_lines(report: AbandonReport, *, is_done: bool) -> list[str]:
    return [
        (done if is_done else planned).format(one)
        for name, (done, planned) in ABANDON_LINES.items()
        for one in sorted(getattr(report, name))
    ]


def _abandon_document(report: AbandonReport) -> dict[str, object]:
    return {"schema": ABANDON_SCHEMA, **to_builtins(asdict(report))}


def old_text(one: OldDatabase) -> str:
    """Describe a database that was set aside, with its size if known."""
    return (
        f"database {one.database} of node {one.node}"
        + (f", {size_text(one.bytes)}" if one.bytes is not None else "")
        + _slots_text(one)
    )
