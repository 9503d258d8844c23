"""Run the commands that need no Spark on a store with one changed document, and say what each made of it."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from cutline.cli.main import run
from tests.mutations.sealing import planted, resealed
from tests.mutations.values import Mutation, Others, mutate
from tests.mutations.world import DELETED_NAME, ENDED_NAME, NAME, PRUNED_NAME, World
from tests.run.bounded import HangError, ended_after

SECONDS_MAX = 20
REFUSED, ACCEPTED, TRACEBACK, HANG = "refused", "accepted", "traceback", "hang"
RETAINED = re.compile(r"^node \S+ keeps \S+ \w+ of WAL")
# What differs between two runs of the same command on the same store.
VARYING = frozenset({
    "retained_wal", "seconds", "operation", "not_asked", "retained",
    # A check records what it has found, and lists show it.
    "last_check", "last_covering_check", "last_full_check", "last_record", "last_valid_check", "standing_conflicts",
    # Of a plan: what is measured and found when it is made.
    "age_seconds", "based_on", "free_bytes", "seconds_are_rough", "seconds_by_step",
    # An operation is taken to run for some time after its last heartbeat.
    "running",
    "seconds_max",
    "seconds_min",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one command made of a case: its exit code, its document, and what that means."""

    command: str
    code: int
    document: Any

    @property
    def kind(self) -> str:
        """Refused, accepted, traceback or hang."""
        if self.code in (70, -1):
            return TRACEBACK if self.code == 70 else HANG
        if self.command.startswith("list"):
            return REFUSED if self.code or self._has_problem() else ACCEPTED
        if self.command.startswith("check"):
            return ACCEPTED if self.code in (0, 4) else REFUSED
        return REFUSED if self.code else ACCEPTED

    def _has_problem(self) -> bool:
        return any(one["problem"] for one in (*self.document["snapshots"], *self.document["open_operations"]))


COMMANDS: Mapping[str, tuple[str, ...]] = {
    "list": ("list",),
    "show": ("show", NAME),
    "check --metadata-only": ("check", NAME, "--metadata-only"),
    "restore --dry-run": ("restore", NAME, "--dry-run"),
}
# A mark concerns its own copy of the chain.
MARKED = {DELETED_NAME: DELETED_NAME, PRUNED_NAME: PRUNED_NAME, ENDED_NAME: ENDED_NAME}


def run_command(world: World, name: str, command: str) -> Outcome:
    """Run one command in this process, with --json and as text."""
    words = [word if word != NAME else name for word in COMMANDS[command]]
    if command.startswith("restore"):
        words += ["--to", str(world.target.path)]
    code, out = _run(["--fleet", str(world.fleet.path), "--json", *words])
    text_code = code
    if command in ("list", "show"):
        text_code, _ = _run(["--fleet", str(world.fleet.path), *words])
    worst = next((one for one in (code, text_code) if one in (70, -1)), code)
    return Outcome(command, worst, json.loads(out) if out.strip() and worst != -1 else {})


def _run(words: list[str]) -> tuple[int, str]:
    out, err = io.StringIO(), io.StringIO()
    try:
        with ended_after(SECONDS_MAX), redirect_stdout(out), redirect_stderr(err):
            code = run(words)
    except HangError:
        return -1, ""
    return code, out.getvalue() if code != 70 else out.getvalue() or json.dumps({"error": err.getvalue()})


@contextmanager
def changed_store(
    world: World, documents: Mapping[str, Any], mutation: Mutation, others: Others, seed: int
) -> Iterator[Any | None]:
    """Put the changed document and its seals into the store for the block; yield it, None if nothing is to change.

    What commands record in the block is removed: a restore warns of conflicts that a check has found before it.
    """
    changed = mutate(documents, mutation, others, seed)
    if changed is None:
        yield None
        return
    operations = world.store / "operations"
    before = set(operations.iterdir())
    with planted(world.store, resealed(documents, mutation.key, changed)):
        yield changed
    for new in set(operations.iterdir()) - before:
        shutil.rmtree(new)


def name_of(key: str) -> str:
    """The snapshot that the document concerns."""
    return next((name for name in MARKED if f"/{name}" in key), NAME)


def comparable(document: Any) -> Any:
    """A command's document without what differs between two runs."""
    if isinstance(document, dict):
        return {name: comparable(value) for name, value in document.items() if name not in VARYING}
    if isinstance(document, list):
        return [comparable(one) for one in document]
    # How much WAL a node keeps, and which node keeps most, changes all the time.
    return RETAINED.sub("", document) if isinstance(document, str) else document
