"""The one rule for destructive commands: print the plan, then ask at a terminal, or require --yes in a script.

`delete`, `prune`, `gc`, `end`, `merge --drop-earlier`, `repair`, `restore --replace` and the commands that undo a
restore or drop old databases follow this rule. Without a terminal they need --yes. If --yes is missing, they exit
before they contact anything, with the exit code of a usage error, so that cron reports a line that can never work. Only
`delete` reads the store first, to report a refusal that --yes would not lift. --dry-run prints the plan and does not
ask. The question is asked before any lock is taken, so that no other operation waits for the answer. The plan is
therefore made again under the lock, and must then destroy the same things. Only gc does not compare the plans: it first
settles dead operations, whose objects then become garbage, too, and it never removes an object that a commit lists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from msgspec import Struct

from cutline.cli.output.arguments import command_context
from cutline.cli.output.results import answer, show_preview
from cutline.cli.process.detaching import is_in_background
from cutline.storage.errors import RefusedError, UsageError

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation. Required in scripts.")]
ANSWERS = ("y", "yes")


class ConfirmationMissingError(UsageError):
    """A destructive command was given without --yes, and nobody can be asked."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(
            f"snapshot {command} needs confirmation, and {why}; nothing was changed",
            hint="in a script, add --yes; to see only the plan, add --dry-run",
            details={"command": command, "option": "--yes"},
        )


class NotConfirmedError(RefusedError):
    """The user answered no."""


class PlanChangedError(RefusedError):
    """A command would destroy something that the user did not confirm."""


class Confirmation(Struct):
    """The confirmation of a command's plan: it `is_given` in advance, or the user `confirmed` these lines."""

    context: typer.Context
    is_given: bool
    confirmed: Sequence[str] | None = None

    def ask(self, plan: Iterable[str], question: str, *, losses: Iterable[str] | None = None) -> None:
        """Print the plan, and ask unless the plan destroys nothing. Raises NotConfirmedError.

        `losses` is the part of the plan that must be the same under the lock; by default, the whole plan.
        """
        lines = list(plan)
        self.confirmed = lines if losses is None else list(losses)
        answer(self.context, {}, lines)
        if not question:
            return
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        try:
            typed = sys.stdin.readline()
        except UnicodeDecodeError:
            # Bytes in another encoding than the terminal's are not a yes.
            typed = "\n"
        if not typed.endswith("\n"):
            sys.stderr.write("\n")
        if typed.strip().lower() not in ANSWERS:
            raise NotConfirmedError("not confirmed; nothing was changed", hint="to see the plan again, add --dry-run")

    def check(self, losses: Iterable[str]) -> None:
        """Raise PlanChangedError unless the plan made under the lock has the losses that were confirmed."""
        if not self.is_given and list(losses) != self.confirmed:
            raise PlanChangedError(
                "the plan has changed since it was confirmed; nothing was changed",
                hint="to see the new plan, repeat the command",
            )

    def announce(self, plan: Iterable[str], losses: Iterable[str]) -> None:
        """Print the plan of a command that was confirmed in advance; otherwise compare its losses."""
        if self.is_given:
            show_preview(self.context, plan)
        else:
            self.check(losses)


def require_confirmation(context: typer.Context, command: str, *, yes: bool) -> Confirmation:
    """Raise ConfirmationMissingError if there is no --yes and nobody can be asked.

    `command` is the command as typed, without its arguments.
    """
    why = "" if yes else _why_nobody_is_asked(context)
    if why:
        raise ConfirmationMissingError(command, why)
    return Confirmation(context, is_given=yes)


def _why_nobody_is_asked(context: typer.Context) -> str:
    if is_in_background():
        return "a background command can't ask"
    if command_context(context).json:
        return "with --json, no questions are asked"
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return "stdin or stderr is not a terminal"
    if not sys.stdout.isatty():
        return "its plan would go to a file or a pipe, where nobody can read it before answering"
    return ""
