"""Try kinds of damage: check a damaged copy of the store, restore what the check accepts, and compare.

A check runs as the whole command, in this process. A restore goes into databases of its own on the servers of the
fleet; pg_dump says what it made. Restores that wait for servers run beside each other.
"""

from __future__ import annotations

import io
import json
import shutil
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
from psycopg import sql
from py4j.protocol import Py4JJavaError

from cutline.check import verify
from cutline.cli.main import run
from cutline.cli.output.failure import CONFLICTS
from cutline.fleet.config import Fleet, load_fleet
from cutline.fleet.progress import Silent
from cutline.fleet.record import fields_of
from cutline.nodes.connections import with_database
from cutline.nodes.programs import run_tool
from cutline.restore.plan.plan import plan_restore
from cutline.restore.plan.request import RestoreRequest
from cutline.restore.run.restore import restore_fleet
from cutline.snapshots.ddl.server_globals_object import read_stored_globals
from cutline.snapshots.records.proven_chains import read_chain
from cutline.spark.spark_jobs import JobCancelledError
from cutline.storage.errors import SnapshotError
from tests.commands.in_process import shared_session
from tests.damage_matrix.damaged import Damaged, copy_store
from tests.damage_matrix.kinds import DAMAGED, POINT, Doubted, Drilled, Found, Hidden, Kind, Refused, Restorable
from tests.damage_matrix.world import DATABASE, World
from tests.run.bounded import HangError, ended_after

Document = dict[str, Any]
# The folder of a trial's store.
STORE = "store"
SECONDS_MAX = 120
RESTORES_AT_ONCE = 3
# The last: the damage can't be done to this chain.
TRACEBACK, HANG, UNDONE = 70, -1, -2
SAME, OTHER = "the same", "something else"
DIFFERENCES_SHOWN, SHOWN_CHARACTERS = 4, 160
COPY_ENDS = "\\."
CANCELLED, JOB_CANCELLED = "cancelled", "[SPARK_JOB_CANCELLED]"


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a kind: the exit code and the document of the check, and what a restore made of the store.

    `keys` are the damaged objects. `restored` is SAME, OTHER, or the refusal of the restore; "" if the check did not
    accept the store, or if there is nothing to restore. `differences` are some of the lines that are other. `built` is
    the document of `check --restorable`, if the kind's outcome needs it.
    """

    kind: Kind
    code: int
    document: Document
    keys: frozenset[str]
    restored: str = ""
    differences: tuple[str, ...] = ()
    built: Document = field(default_factory=dict)

    @property
    def is_accepted(self) -> bool:
        """Whether the check passed."""
        return self.code == 0

    @property
    def conflicts(self) -> list[Document]:
        """The conflicts that the check reported."""
        return _conflicts(self.document)

    @property
    def doubts(self) -> list[Document]:
        """The doubts of which the check warned."""
        return [one for snapshot in self.document.get("snapshots", ()) for one in snapshot.get("doubts", ())]

    @property
    def problem(self) -> str:
        """How the result differs from the declared outcome; "" if it does not."""
        if self.code == UNDONE:
            return f"the damage can't be done: {self._shown}"
        if self.code in (TRACEBACK, HANG):
            return f"the check {'crashed' if self.code == TRACEBACK else 'hung'}: {self._shown}"
        expected = self.kind.expected
        if isinstance(expected, Found):
            if self.code == CONFLICTS and any(self._is_named(expected, one) for one in self.conflicts):
                return ""
            if self.is_accepted:
                return f"accepted; a restore {self._outcome}"
            return f"not found as {', '.join(sorted(expected.kinds))} {_place(expected)}, but {self._shown}"
        if isinstance(expected, Refused):
            is_as_declared = (self.code, self.document.get("error")) == (expected.code, expected.error)
            return "" if is_as_declared else f"not refused as {expected.error}, but {self._shown}"
        if isinstance(expected, Restorable | Drilled):
            return self._problem_of_refused(expected)
        return self._problem_of_accepted(expected)

    def _problem_of_refused(self, expected: Restorable | Drilled) -> str:
        if not self.is_accepted:
            return f"found already by the check: {self._shown}"
        if self.is_missed:
            return f"not found by --restorable; a restore {self._outcome}"
        return "" if self.restored not in ("", SAME, OTHER) else f"accepted; a restore {self._outcome}"

    @property
    def _builds_without_conflict(self) -> bool:
        """Whether `check --restorable` found nothing at the expected place."""
        expected = self.kind.expected
        return not isinstance(expected, Restorable) or not any(
            one["kind"] == "restore" and (one["node"], one["group"]) == (expected.node, expected.group)
            for one in _conflicts(self.built)
        )

    def _problem_of_accepted(self, expected: Hidden | Doubted) -> str:
        if not self.is_accepted:
            return f"a false alarm: {self._shown}"
        if self.is_missed:
            return f"accepted without a warning; a restore {self._outcome}"
        wanted = "" if self.kind.fleet == POINT else SAME if expected.is_same else OTHER
        return "" if self.restored == wanted else f"accepted; a restore {self._outcome}"

    @property
    def is_missed(self) -> bool:
        """Whether the check accepted what a reader can tell, or did not warn of it."""
        expected = self.kind.expected
        if isinstance(expected, Doubted):
            return self.is_accepted and not expected.kinds & {one["kind"] for one in self.doubts}
        if isinstance(expected, Restorable):
            return self.is_accepted and self._builds_without_conflict
        return self.is_accepted and isinstance(expected, Found)

    @property
    def _outcome(self) -> str:
        if self.restored in (SAME, OTHER):
            return f"brings back {self.restored}{''.join(f' | {line}' for line in self.differences)}"
        return f"refuses: {self.restored}" if self.restored else "is not possible"

    @property
    def _shown(self) -> str:
        """What the check said, in a line."""
        if self.conflicts:
            some = [f"{one['kind']} ({one['node'] or one['object'] or ''}): {one['detail']}" for one in self.conflicts]
            return f"exit {self.code}: {' | '.join(some[:DIFFERENCES_SHOWN])}"
        skipped = [one["what"] for snapshot in self.document.get("snapshots", ()) for one in snapshot["skipped"]]
        message = self.document.get("message") or self.document.get("stderr", "")
        return f"exit {self.code}: {self.document.get('error', '')} {message} {' | '.join(skipped)}"

    def _is_named(self, expected: Found, conflict: Document) -> bool:
        return (
            conflict["kind"] in expected.kinds
            and expected.node in ("", conflict["node"], conflict["other_node"])
            and (expected.group in ("", conflict["group"]) or expected.group in conflict["detail"])
            and (
                expected.object in ("", conflict["object"])
                or (expected.object == DAMAGED and conflict["object"] in self.keys)
            )
        )


def _conflicts(document: Document) -> list[Document]:
    return [one for snapshot in document.get("snapshots", ()) for one in snapshot["conflicts"]]


def _place(expected: Found) -> str:
    return " ".join(filter(None, ("at", expected.node, expected.group, expected.object))) if expected.node else ""


@dataclass(slots=True)
class Trials:
    """The trials in one world. `clean` is what a restore of each chain makes, by fleet and increment.

    Checks read one copy of the store, in which the damage of a kind is undone before that of the next. What a check
    accepts is copied for its restore.
    """

    world: World
    clean: dict[tuple[str, int | None], str] = field(default_factory=dict)
    made: int = 0

    def run(self, kinds: Sequence[Kind], note: Callable[[Result], object] = lambda _: None) -> list[Result]:
        """Try the kinds; the results are in the order of the kinds, and `note` gets each as it is known."""
        results: list[Result] = []
        with ThreadPoolExecutor(RESTORES_AT_ONCE) as threads, self._folder() as folder:
            copy_store(self.world.store, folder / STORE)
            fleet = self._fleet(folder)
            for some in _batches(kinds):
                results += self._run_batch(some, fleet, threads, note)
        return results

    def check_clean(self, name: str) -> tuple[int, Document]:
        """Check a chain as it is, in a copy of the store: the record of a check shows that its points were there."""
        with self._folder() as folder:
            copy_store(self.world.store, folder / STORE)
            return self.check(self._fleet(folder), name)

    def _run_batch(
        self, kinds: Sequence[Kind], fleet: Fleet, threads: ThreadPoolExecutor, note: Callable[[Result], object]
    ) -> Iterator[Result]:
        with ExitStack() as stack:
            checked, folders = list[Result](), list[Path | None]()
            for kind in kinds:
                store = Damaged.open(fleet.path.parent / STORE, kind.fleet)
                try:
                    result = self._check(kind, store, fleet)
                    folder = None
                    if result.is_accepted and kind.fleet != POINT:
                        self._restore_clean(kind)
                        folder = stack.enter_context(self._folder())
                        copy_store(store.root, folder / STORE)
                finally:
                    store.undo(self.world.store)
                checked.append(result)
                folders.append(folder)
            for result, folder in zip(threads.map(self._restore_beside, checked, folders), folders, strict=True):
                # A restore that fails cancels the jobs of those beside it, also of one that is repeated.
                while result.restored == CANCELLED:
                    result = self._restore_beside(result, folder)
                note(result)
                yield result

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """A folder of a trial, which is removed at the end of the block."""
        folder = self.world.folder / f"trial-{self.made}"
        self.made += 1
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder)

    def _check(self, kind: Kind, store: Damaged, fleet: Fleet) -> Result:
        try:
            kind.damage(store)
        except Exception as error:  # noqa: BLE001  # the other kinds can still be tried
            return Result(kind, UNDONE, {"message": f"{type(error).__name__}: {error}"}, frozenset())
        words = [] if kind.increment is None else ["--increment", str(kind.increment)]
        with patch.object(verify, "STORED_BYTES_MAX", 0 if is_read_by_jobs(kind) else verify.STORED_BYTES_MAX):
            code, document = self.check(fleet, kind.fleet, *words)
        result = Result(kind, code, document, frozenset(store.keys))
        if result.is_accepted and isinstance(kind.expected, Restorable):
            return replace(result, built=self.check(fleet, kind.fleet, "--restorable", *words)[1])
        return result

    def check(self, fleet: Fleet, *words: str) -> tuple[int, Document]:
        """Run `snapshot check` in this process; return its exit code and document, HANG if it takes too long."""
        out, err = io.StringIO(), io.StringIO()
        try:
            with (
                ended_after(SECONDS_MAX), shared_session(self.world.spark.session()),
                redirect_stdout(out), redirect_stderr(err),
            ):  # fmt: skip
                code = run(["--fleet", str(fleet.path), "--json", "check", *words])
        except HangError:
            return HANG, {}
        text = out.getvalue()
        return code, json.loads(text) if text.strip() else {"stderr": err.getvalue()[-1000:]}

    def _fleet(self, folder: Path) -> Fleet:
        """The fleet with the store in the folder."""
        path = folder / "fleet.toml"
        path.write_text(self.world.fleet.path.read_text().replace(str(self.world.store), str(folder / STORE)))
        return load_fleet(path)

    def _restore_clean(self, kind: Kind) -> None:
        place = kind.fleet, kind.increment
        if place not in self.clean:
            self.clean[place] = self.restored(self.world.fleet, kind.fleet, kind.increment, f"{DATABASE}_clean")

    def _restore_beside(self, result: Result, folder: Path | None) -> Result:
        """Restore while other restores run; the result is CANCELLED if one of them has cancelled the jobs."""
        try:
            return self._restore(result, folder)
        except JobCancelledError:
            return replace(result, restored=CANCELLED)
        except Py4JJavaError as error:
            if JOB_CANCELLED not in str(error):
                raise
            return replace(result, restored=CANCELLED)

    def _restore(self, result: Result, folder: Path | None) -> Result:
        """Restore the copy of the store in the folder; None if there is nothing to restore."""
        kind = result.kind
        if folder is None:
            return result
        database = f"{DATABASE}_{folder.name.rpartition('-')[2]}"
        try:
            found = self.restored(self._fleet(folder), kind.fleet, kind.increment, database)
        except SnapshotError as error:
            return replace(result, restored=f"{error.slug}: {error.message}"[:SHOWN_CHARACTERS])
        clean = self.clean[kind.fleet, kind.increment]
        if found == clean:
            return replace(result, restored=SAME)
        return replace(result, restored=OTHER, differences=tuple(_differences(clean, found)))

    def restored(self, fleet: Fleet, name: str, increment: int | None, database: str) -> str:
        """Restore into databases of that name and return what they contain, and the globals that the store has.

        A restore changes no role that the server has, so the globals show what it would create elsewhere.
        """
        primaries = tuple(with_database(node, database) for node in fleet.primaries)
        try:
            request = RestoreRequest(name, increment)
            restore_fleet(plan_restore(fleet, replace(fleet, nodes=primaries), request), self.world.spark, Silent())
            chain = read_chain(fleet.store.open(), name, increment)
            stored = [read_stored_globals(fleet.store.open(), chain, node.id) for node in primaries]
            globals_ = [json.dumps(fields_of(one)) if one else "" for one in stored]
            return "\n".join([*(dumped(node.dsn, database) for node in primaries), *globals_])
        finally:
            for node in primaries:
                drop_databases(with_database(node, "postgres").dsn, database)


def is_read_by_jobs(kind: Kind) -> bool:
    """Whether Spark jobs read the archives: otherwise the driver does, as they are small. The same in every run."""
    return zlib.crc32(kind.id.encode()) % 4 == 0


def _batches(kinds: Sequence[Kind]) -> Iterator[Sequence[Kind]]:
    size = 8 * RESTORES_AT_ONCE
    return (kinds[at : at + size] for at in range(0, len(kinds), size))


def dumped(dsn: str, database: str) -> str:
    """Return what pg_dump writes of a database and everything in it, with the rows of each table in order."""
    text = run_tool("pg_dump", "--dbname", dsn, "--create", "--restrict-key=matrix").stdout
    lines: list[str] = []
    rows: list[str] | None = None
    for line in text.replace(database, "RESTORED").split("\n"):
        if rows is None:
            lines.append(line)
            rows = [] if line.startswith("COPY ") and line.endswith("FROM stdin;") else None
        elif line == COPY_ENDS:
            lines += [*sorted(rows), line]
            rows = None
        else:
            rows.append(line)
    return "\n".join(lines)


def drop_databases(maintenance: str, prefix: str) -> None:
    """Drop the databases that a restore made or left behind."""
    with psycopg.connect(maintenance, autocommit=True) as connection:
        query = "SELECT datname FROM pg_database WHERE datname = %s OR datname ^@ %s"
        for (name,) in connection.execute(query, (prefix, f"{prefix}_")).fetchall():
            # Nobody drops a template.
            connection.execute(sql.SQL("ALTER DATABASE {} IS_TEMPLATE false").format(sql.Identifier(name)))
            connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def _differences(clean: str, found: str) -> list[str]:
    """Return the first lines that only one of both has, or has more often."""
    before, after = Counter(clean.split("\n")), Counter(found.split("\n"))
    sides = [[f"{sign} {line}"[:SHOWN_CHARACTERS] for line in lines] for sign, lines in (
        ("-", before - after), ("+", after - before))]  # fmt: skip
    return [line for side in sides for line in side[: DIFFERENCES_SHOWN // 2]] or ["lines in another order"]
