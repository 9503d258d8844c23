"""`snapshot restore NAME --resume`, `--abandon` and `--discard-old`, and what is asked before something is dropped."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from cutline.cli.output.results import answer, emit, progress
from cutline.cli.output.tables import size_text
from cutline.fleet.config import Fleet
from cutline.fleet.messages import SAME_TARGET
from cutline.fleet.record import to_builtins
from cutline.nodes.other_databases import OldDatabase
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.scope.scope import RestoreScope
from cutline.restore.unfinished.undoing import (
    AbandonReport,
    abandon_restore,
    discard_old,
    find_old,
    preview_abandon,
)
from cutline.storage.errors import RefusedError, SnapshotError, UsageError

RESUME, ABANDON, DISCARD_OLD = ENDS = ("--resume", "--abandon", "--discard-old")
# A command that names its target itself.
ELSEWHERE = re.compile(r" --to\b")
# A command in a hint, up to what follows it: `; and …` or, after three spaces, `or: --option`.
WORD = r"""(?:'[^']*'|"[^"]*"|[^\s;'"])+"""
RESTORE_COMMAND = re.compile(rf"snapshot restore {WORD}(?: (?!or:){WORD})*(?=;|$| {{3}})")
# What only the command knows: hints of rows that are refused, say, come from executors.
UNNAMED = re.compile(r"(snapshot (?:restore|show) )NAME\b")
ABANDON_SCHEMA, DISCARD_SCHEMA = "cutline/restore-abandon/1", "cutline/restore-discard/1"
# By field of the report: what has been done, and what would be.
ABANDON_LINES = {
    "operations": ("restore {} is undone", "restore {} would be undone"),
    "done": (
        "restore {} had decided to publish, and nothing of it is left to be ended: it is recorded as done",
        "restore {} has decided to publish, and nothing of it is left to be ended: it would be recorded as done",
    ),
    "put_back": (
        "previous database has its name again on {}",
        "previous database would get its name again on {}",
    ),
    "dropped": ("dropped on {}", "to drop on {}"),
    "slots_dropped": (
        "slot dropped with its database, its chain has ended, on {}",
        "slot to drop with its database, its chain would end, on {}",
    ),
    "emptied": ("emptied on {}", "to empty on {}"),
    "opened": ("{} accepts connections again", "{} would accept connections again"),
}
NOT_CHANGED, NOTHING_ASIDE = "nothing was changed", "no database was put aside"


@dataclass(frozen=True, slots=True)
class Confirmation:
    """Asks for --yes, unless it is given or nobody is at a terminal."""

    is_given: bool

    def replacing(self, lines: list[str]) -> None:
        """Raise NotConfirmedError if there is something that the restore ends."""
        self._ask(lines, "--replace")

    def abandoning(self, lines: list[str]) -> None:
        """Raise NotConfirmedError if a database is dropped, or tables are emptied, that users may have written to."""
        self._ask(lines, "--abandon")

    def dropping(self, old: list[OldDatabase]) -> None:
        """Raise NotConfirmedError if there is a database to drop."""
        self._ask([old_text(database) for database in old], "--discard-old")

    def _ask(self, lines: list[str], option: str) -> None:
        if lines and not self.is_given:
            raise NotConfirmedError(
                f"{option} has to be confirmed: {'; '.join(lines)}",
                hint="nothing was changed; if this is meant, add --yes",
                details={"lines": lines},
            )


class NotConfirmedError(RefusedError):
    """Somebody at a terminal has not confirmed what can't be undone."""


@contextmanager
def naming_target(name: str, to: Path | None) -> Iterator[None]:
    """Let the hints of an error name the snapshot, where only the command knows it, and the target as it was given."""
    try:
        yield
    except SnapshotError as error:
        hint = UNNAMED.sub(lambda found: f"{found[1]}{name}", error.hint)
        error.hint = "\n".join(name_target(line, to) for line in hint.split("\n") if line != SAME_TARGET)
        raise


def name_target(line: str, to: Path | None) -> str:
    """The line of a hint with the target in every command that ends a restore and names none."""
    given = f" --to {shlex.quote(str(to))}" if to else ""
    return RESTORE_COMMAND.sub(lambda found: found[0] if ELSEWHERE.search(found[0]) else f"{found[0]}{given}", line)


def check_ends(words: list[str], request: RestoreRequest) -> None:
    """Raise UsageError unless one of ENDS is given alone, or with --node."""
    allows = request.allow_refused_ddl and words == [RESUME]
    alone = RestoreRequest(request.name, allow_refused_ddl=allows, scope=RestoreScope(nodes=request.scope.nodes))
    if len(words) > 1:
        raise UsageError(f"{' and '.join(words)} exclude each other", hint="give one of them")
    if request != alone:
        raise UsageError(
            f"{words[0]} takes only --to, --node, --dry-run and --yes, and --resume --allow-refused-ddl",
            hint="leave the others out",
        )


def undo_restore(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, confirm: Confirmation
) -> None:
    """Undo an unfinished restore."""
    with progress(context) as shown:
        report = abandon_restore(source, target, request.name, confirm.abandoning, shown, request.scope.nodes)
    emit(context, _abandon_document(report), _abandon_lines(report, is_done=True))


def show_undo(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, _confirm: Confirmation
) -> None:
    """Print what undoing an unfinished restore would do."""
    with progress(context) as shown:
        report, entered = preview_abandon(source, target, request.name, shown, request.scope.nodes)
    lines = _abandon_lines(report, is_done=False)
    lines += [f"to be confirmed with --yes: {line}" for line in entered]
    answer(context, _abandon_document(report) | {"dry_run": True, "to_confirm": entered}, [*lines, NOT_CHANGED])


def _abandon_lines(report: AbandonReport, *, is_done: bool) -> list[str]:
    return [
        (done if is_done else planned).format(one)
        for name, (done, planned) in ABANDON_LINES.items()
        for one in sorted(getattr(report, name))
    ]


def _abandon_document(report: AbandonReport) -> dict[str, object]:
    return {"schema": ABANDON_SCHEMA, **to_builtins(asdict(report))}


def drop_old_databases(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, confirm: Confirmation
) -> None:
    """Drop what restores have put aside."""
    with progress(context) as shown:
        old = discard_old(source, target, request.name, confirm.dropping, shown, request.scope.nodes)
    lines = [f"dropped: {old_text(database)}" for database in old] or [NOTHING_ASIDE]
    emit(context, {"schema": DISCARD_SCHEMA, "discarded": [asdict(database) for database in old]}, lines)


def show_old_databases(
    context: typer.Context, source: Fleet, target: Fleet, request: RestoreRequest, _confirm: Confirmation
) -> None:
    """Print what restores have put aside."""
    with progress(context) as shown:
        old = find_old(source, target, request.name, shown, request.scope.nodes)
    lines = [*(f"to drop: {old_text(database)}" for database in old), NOT_CHANGED] if old else [NOTHING_ASIDE]
    answer(
        context, {"schema": DISCARD_SCHEMA, "discarded": [asdict(database) for database in old], "dry_run": True}, lines
    )


def old_text(one: OldDatabase) -> str:
    """A database that was put aside, with its size if that is known."""
    return f"database {one.database} of node {one.node}" + (
        f", {size_text(one.bytes)}" if one.bytes is not None else ""
    )
