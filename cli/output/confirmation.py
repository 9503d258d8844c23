"""The one rule of the commands that destroy: the plan is printed, a terminal is asked, and a script passes --yes.

`delete`, `prune`, `gc`, `restore --replace` and the commands that undo a restore or drop old databases follow it.
Where nobody can be asked they need --yes. Without it they refuse before they contact anything, with the exit code of
a usage mistake, so that cron reports the line that never worked. --dry-run prints the plan and asks nothing.

The question is asked before any lock is taken: nobody has to wait until it is answered. The plan is therefore made
again under the lock, and has to lose the same. gc alone does not compare: it settles dead operations first, whose
objects are then garbage, too, and never removes an object that a commit lists.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from cutline.cli.output.arguments import command_context
from cutline.cli.output.results import answer, show_preview
from cutline.cli.process.detaching import is_in_background
from cutline.storage.errors import RefusedError, UsageError

Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation. Scripts need it.")]
ANSWERS = ("y", "yes")


class ConfirmationMissingError(UsageError):
    """A command that destroys has no --yes, and nobody can be asked."""

    def __init__(self, command: str, why: str) -> None:
        super().__init__(
            f"snapshot {command} has to be confirmed, and {why}; nothing was changed",
            hint="in a script add --yes; to see the plan only, add --dry-run",
            details={"command": command, "option": "--yes"},
        )


class NotConfirmedError(RefusedError):
    """Somebody at a terminal has answered no."""


class PlanChangedError(RefusedError):
    """A command would destroy something else than was confirmed."""


@dataclass(slots=True)
class Confirmation:
    """The answer to a command's plan: `is_given` beforehand, or the lines of it that were `confirmed`."""

    context: typer.Context
    is_given: bool
    confirmed: Sequence[str] | None = None

    def ask(self, plan: Iterable[str], question: str, *, losses: Iterable[str] | None = None) -> None:
        """Print the plan and ask; without a question it destroys nothing. Raises NotConfirmedError.

        `losses` is the part of the plan that has to be the same under the lock; by default all of it.
        """
        lines = list(plan)
        self.confirmed = lines if losses is None else list(losses)
        answer(self.context, {}, lines)
        if not question:
            return
        sys.stderr.write(f"{question} [y/N] ")
        sys.stderr.flush()
        typed = sys.stdin.readline()
        if not typed.endswith("\n"):
            sys.stderr.write("\n")
        if typed.strip().lower() not in ANSWERS:
            raise NotConfirmedError("not confirmed; nothing was changed", hint="to see the plan again, add --dry-run")

    def check(self, losses: Iterable[str]) -> None:
        """Raise PlanChangedError unless the plan made under the lock loses what was confirmed."""
        if not self.is_given and list(losses) != self.confirmed:
            raise PlanChangedError(
                "the plan has changed since it was confirmed; nothing was changed",
                hint="repeat the command: it prints the new plan",
            )

    def announce(self, plan: Iterable[str], losses: Iterable[str]) -> None:
        """Print the plan of a command that was confirmed beforehand; otherwise compare its losses."""
        if self.is_given:
            show_preview(self.context, plan)
        else:
            self.check(losses)


def require_confirmation(context: typer.Context, command: str, *, yes: bool) -> Confirmation:
    """Raise ConfirmationMissingError if there is no --yes and nobody can be asked.

    `command` is as it was typed, without its arguments.
    """
    why = "" if yes else _why_nobody_is_asked(context)
    if why:
        raise ConfirmationMissingError(command, why)
    return Confirmation(context, is_given=yes)


def _why_nobody_is_asked(context: typer.Context) -> str:
    if is_in_background():
        return "a command in the background can't ask"
    if command_context(context).json:
        return "with --json nothing is asked"
    if not (sys.stdin and sys.stdin.isatty() and sys.stderr.isatty()):
        return "there is no terminal to ask"
    if not sys.stdout.isatty():
        return "its plan would go to a file or a pipe, where nobody reads it before answering"
    return ""
