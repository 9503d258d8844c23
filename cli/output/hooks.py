"""Hooks before and after a command, and the requests that tell a monitor whether it succeeded.

A hook gets the event as JSON on stdin. If the hook before a command fails, the command is refused, before it has
changed anything. Whatever happens after a command never changes its exit code.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

import typer
from msgspec import Struct, field

from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import BUSY, CANCELLED, DONE, INTERRUPTED, CommandFailure, classify, unexpected
from cutline.cli.output.results import jsonable
from cutline.cli.process.event_programs import run_program
from cutline.fleet.config import Fleet
from cutline.fleet.record import Time
from cutline.storage.clock import utc_now
from cutline.storage.errors import RefusedError, find_behind, redact, remember_secret

SCHEMA = "cutline/hook/1"
# The end of these commands is reported under another name.
PINGED_AS = {"restore-resume": "restore"}
# Ends that say nothing about the fleet: another operation runs, or somebody stopped the command. If they recur, the
# monitor misses the successes.
UNPINGED = (BUSY, CANCELLED, INTERRUPTED)
REQUEST_SECONDS_MAX, PING_SECONDS_MAX = 5.0, 10.0
# After an interrupt, the user or the system waits for the command to end.
INTERRUPTED_SECONDS_MAX = 10.0
MESSAGE_CHARACTERS_MAX = 10_000


class HookFailedError(RefusedError):
    """The hook before a command failed, so the command was not begun."""


class HookedRun(Struct):
    """A command that runs between its hooks: what it tells the hook after it.

    `operation` is the id of its operation, and `result` its result as JSON, once there are any. If the process
    `goes_on` after the command, an interrupt while the hook after it runs is raised, because it concerns the process.
    """

    fleet: Fleet
    command: str
    snapshot: str | None
    warn: Callable[[str], None]
    details: Mapping[str, object] = field(default_factory=dict)
    operation: str | None = None
    result: Mapping[str, object] | None = None
    goes_on: bool = False
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _began: float = field(default_factory=time.monotonic)

    def begin(self) -> None:
        """Run the hook before the command; raise HookFailedError."""
        hooks = self.fleet.hooks
        if hooks.before and (
            problem := run_program("[hooks] before", hooks.before, self._event("before"), hooks.timeout)
        ):
            raise HookFailedError(
                f"{self.command} was not begun: {redact(problem)}",
                hint="find out from the program why it failed, then repeat the command",
            )

    def end(self, failure: CommandFailure) -> None:
        """Run the hook after the command, and report its end to the monitor; the code of a success is DONE."""
        hooks = self.fleet.hooks
        is_interrupted = failure.code in (CANCELLED, INTERRUPTED)
        seconds_max = min(hooks.timeout, INTERRUPTED_SECONDS_MAX) if is_interrupted else hooks.timeout
        if hooks.after and (problem := run_program("[hooks] after", hooks.after, self._after(failure), seconds_max)):
            self.warn(redact(problem))
        self.ping(failure)

    def ping(self, failure: CommandFailure) -> None:
        """Report the end of the command to the monitor, if fleet.toml names it and the end says something."""
        name = PINGED_AS.get(self.command, self.command)
        if not self.fleet.success_url or name not in self.fleet.success_of or failure.code in UNPINGED:
            return
        if problem := ping(self.fleet.success_url.replace("{command}", name), failure):
            self.warn(f"the end of {self.command} could not be reported to [notify] success_url: {problem}")

    def _event(self, event: str) -> dict[str, object]:
        return {
            "schema": SCHEMA,
            "event": event,
            "run": self._id,
            "at": Time.of(utc_now()),
            "fleet": self.fleet.name,
            "command": self.command,
            "snapshot": self.snapshot,
            "operation": self.operation,
            **self.details,
        }

    def _after(self, failure: CommandFailure) -> dict[str, object]:
        result = None if self.result is None else jsonable(self.result)
        return self._event("after") | {
            "seconds": round(time.monotonic() - self._began, 3),
            "code": failure.code,
            "error": failure.slug or None,
            "message": failure.message or None,
            "hint": failure.hint or None,
            "result": result,
        }


@contextmanager
def between_hooks(run: HookedRun) -> Iterator[HookedRun]:
    """Run the block between the hooks; raise HookFailedError before it, and whatever the block raises.

    Raises KeyboardInterrupt after it only if the process goes on.
    """
    try:
        run.begin()
    except HookFailedError as error:
        run.ping(CommandFailure(error.exit_code, error.slug, error.message, error.hint))
        raise
    try:
        yield run
    except BaseException as error:
        _ending(run, error)
        raise
    _ending(run, None)


def _ending(run: HookedRun, error: BaseException | None) -> None:
    try:
        run.end(failure_at_end(error, run.result))
    except KeyboardInterrupt:
        if error is None or find_behind(error, KeyboardInterrupt) is None:
            # The command has ended: an interrupt can no longer change its result.
            run.warn("the hook after the command was interrupted")
            if run.goes_on:
                raise


def failure_at_end(error: BaseException | None, result: Mapping[str, object] | None) -> CommandFailure:
    """Return how a command ended: with an error, or with an exit code and a result."""
    if error is None:
        return CommandFailure(DONE, "", "")
    if not isinstance(error, typer.Exit):
        return classify(error) or unexpected(error)
    if not error.exit_code:
        return CommandFailure(DONE, "", "")
    verdict = str((result or {}).get("result") or "")
    return CommandFailure(error.exit_code, verdict, verdict or f"exit code {error.exit_code}")


@contextmanager
def with_hooks(
    context: typer.Context,
    fleet: Fleet,
    command: str,
    snapshot: str | None = None,
    *,
    is_dry: bool = False,
    **details: object,
) -> Iterator[None]:
    """Run the rest of a command between its hooks, unless the run `is_dry`; `details` are part of their events."""
    options = command_context(context)
    if is_dry:
        yield
        return
    with between_hooks(HookedRun(fleet, command, snapshot, options.warn, details)) as run:
        try:
            yield
        finally:
            run.operation = next(iter(options.operations), None)
            run.result = next(reversed(options.results), None)


def ping(url: str, failure: CommandFailure) -> str:
    """Send a GET request after a success, or else a POST request with the message to the address `…/fail`.

    Returns the problem, without the address, which may be secret; or "".
    """
    remember_secret(url)
    problems: list[str] = []
    # A daemon: the search for a host's address has no time limit of its own.
    thread = threading.Thread(target=lambda: problems.append(_request(url, failure)), name="ping", daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no more threads can be started
        return str(error)
    thread.join(PING_SECONDS_MAX)
    return problems[0] if problems else f"no answer for {PING_SECONDS_MAX:.0f} s"


def _request(url: str, failure: CommandFailure) -> str:
    # Imported here: most commands send nothing.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    body = None
    if failure.code:
        parts = urlsplit(url)
        url = urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/fail"))
        text = f"exit code {failure.code}: {failure.message}" + (f"\nhint: {failure.hint}" if failure.hint else "")
        body = redact(text)[:MESSAGE_CHARACTERS_MAX].encode()
    headers = {"Content-Type": "text/plain; charset=utf-8"} if body else {}
    try:
        with urlopen(Request(url, body, headers), timeout=REQUEST_SECONDS_MAX):
            return ""
    except HTTPError as error:
        return f"the answer was {error.code} {error.reason}"
    except URLError as error:
        return redact(str(error.reason))
    except (OSError, HTTPException, ValueError) as error:
        return redact(str(error) or type(error).__name__)
