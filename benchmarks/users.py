"""The users' case: realistic rows, and each command in a separate process, as under cron; compared with the peers.

The tools take turns, so that none of them always has warm caches or a busy disk. A restore counts only if it brings the
source's rows back.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cutline import COMMAND
from benchmarks.parts import CUTLINE_DATABASE, PEER_DATABASE, take_turns
from benchmarks.processes import Ran, run_measured
from benchmarks.results import Results
from benchmarks.shard import SETTINGS, Shard
from benchmarks.shop import Shop
from cutline.embedded.fleet import EmbeddedFleet, start_fleet, stop_fleet
from cutline.embedded.folder import DATABASE
from cutline.embedded.server import PORT, SUPERUSER
from cutline.nodes.programs import run_tool

CREATES, INCREMENTS, CHECKS, RESTORES, SMALL_RUNS = 5, 2, 3, 5, 3
SMALL_SHARDS, SMALL_ROWS = 2, 35_000
STANZA = "bench"
SECONDS_MAX = 3600.0
PGBACKREST = "pgbackrest"
# Level 1 of gzip, in the words of every version.
DUMP = ("--format=directory", "--jobs=2", "--compress=1")


@dataclass(slots=True)
class Users:
    """One run. `programs` is the folder of the server's programs, None for the wheel's; `say` reports the step."""

    shop: Shop
    results: Results
    folder: Path
    programs: Path | None
    say: Callable[[str], None]

    @property
    def fleet_toml(self) -> Path:
        """The fleet file of the shop."""
        return self.shop.shard.fleet.fleet_toml

    def command(self, task: str, *words: str) -> dict[str, object] | None:
        """Run `snapshot` as one run of `task`; return its document."""
        self.say(task)
        return run_command(self.results, task, self.fleet_toml, self.folder / "cache", words)

    def tool(self, task: str, name: str, *words: str, stored: Path | None = None) -> None:
        """Run one of PostgreSQL's tools as one run of `task`, which fills the folder `stored`."""
        self.say(task)
        if stored is not None and stored.exists():
            shutil.rmtree(stored)
        self.results.measure(
            task,
            lambda: run_tool(name, *words, seconds_max=SECONDS_MAX, folder=self.programs),
            (lambda _: size_of(stored)) if stored else None,
        )

    def set_out(self) -> None:
        """Leave nothing behind of earlier steps that would slow down the next."""
        self.shop.shard.checkpoint()


def users_part(results: Results, rows: int, programs: Path | None, folder: Path, say: Callable[[str], None]) -> None:
    """Measure the commands on realistic rows, and the peers on the same server."""
    with running_shop(folder, rows, programs, say) as shop:
        users = Users(shop, results, folder, programs, say)
        users.command("init", "init")
        backrest = PgBackRest.of(users)
        _create(users, backrest)
        _increments(users, backrest)
        _checks(users)
        _restores(users)


@contextmanager
def running_shop(folder: Path, rows: int, programs: Path | None, say: Callable[[str], None]) -> Iterator[Shop]:
    """Start a server with the shop's database; stop and delete it at the end."""
    say(f"starting a server with {rows} realistic rows")
    # Older servers have no WAL summaries.
    settings = {name: value for name, value in SETTINGS.items() if programs is None or name != "summarize_wal"}
    fleet = start_fleet(
        folder / "shop", shards=1, backups=0, settings=settings, schema=False,
        programs={"s1": programs} if programs else None,
    )  # fmt: skip
    try:
        shard = Shard(fleet, folder)
        shard.create_database(DATABASE)
        allow_one_copy(fleet)
        shop = Shop(shard, rows)
        shop.fill()
        yield shop
    finally:
        stop_fleet(folder / "shop", delete=True)


def _create(users: Users, backrest: PgBackRest | None) -> None:
    dsn, shard = users.shop.shard.dsn, users.shop.shard

    def create(repeat: int) -> None:
        document = users.command("create", "create", f"full-{repeat}")
        if document:
            users.results.note_size("create", _stored_bytes(document))

    def dump(_: int) -> None:
        stored = users.folder / "dump"
        users.tool("pg_dump", "pg_dump", *DUMP, f"--file={stored}", dsn, stored=stored)

    def back_up(_: int) -> None:
        stored = users.folder / "backup"
        how = ("--format=tar", "--gzip", "--compress=1", "--checkpoint=fast", "--wal-method=none")
        users.tool("pg_basebackup", "pg_basebackup", f"--dbname={dsn}", f"--pgdata={stored}", *how, stored=stored)

    tools: list[Callable[[int], object]] = [create, dump, back_up]
    if backrest:
        tools.append(lambda _: backrest.back_up("pgBackRest full", "full"))
    shard.checkpoint()
    take_turns(CREATES, tools)
    for number in range(1, CREATES):
        users.command("delete", "delete", f"full-{number}", "--yes")


def _increments(users: Users, backrest: PgBackRest | None) -> None:
    def increment(_: int) -> None:
        document = users.command("increment", "create", "full-0", "--incremental")
        if document:
            users.results.note_size("increment", _stored_bytes(document))

    tools: list[Callable[[int], object]] = [increment]
    if backrest:
        tools.append(lambda _: backrest.back_up("pgBackRest incr", "incr"))
    for number in range(INCREMENTS):
        changed = users.results.attempt("changes", users.shop.change)
        users.say(f"{changed} changes")
        take_turns(1, tools[number % len(tools) :] + tools[: number % len(tools)])


def _checks(users: Users) -> None:
    def check(_: int) -> None:
        users.set_out()
        users.command("check of increment 2", "check", "full-0", "--increment", "2")

    def create(repeat: int) -> None:
        users.set_out()
        users.command("create of the same state", "create", f"same-{repeat}")
        users.command("delete", "delete", f"same-{repeat}", "--yes")

    take_turns(CHECKS, [check, create])


def _restores(users: Users) -> None:
    shop, shard = users.shop, users.shop.shard
    # No increment follows: the chain's slot would retain the WAL of all restores, until the disk or memory is full.
    shard.ask("SELECT count(pg_drop_replication_slot(slot_name)) FROM pg_replication_slots")
    states: Mapping[int, object] = {2: users.results.attempt("state", shop.state)}
    stored, target = users.folder / "final", users.folder / "target.toml"
    target.write_text(users.fleet_toml.read_text().replace(shard.dsn, shard.primary.dsn(CUTLINE_DATABASE)))
    users.tool("final dump", "pg_dump", *DUMP, f"--file={stored}", shard.dsn, stored=stored)

    def restore(task: str, increment: int) -> None:
        shard.drop_database(CUTLINE_DATABASE)
        users.set_out()
        done = users.command(task, "restore", "full-0", "--increment", str(increment), "--to", str(target), "--yes")
        if done and increment in states:
            users.results.attempt(task, lambda: expect(shop.state(CUTLINE_DATABASE), states[increment]))
        shard.drop_database(CUTLINE_DATABASE)

    def peer(_: int) -> None:
        dsn = shard.create_database(PEER_DATABASE)
        users.set_out()
        users.tool("pg_restore", "pg_restore", "--jobs=2", "--exit-on-error", f"--dbname={dsn}", str(stored))
        users.results.attempt("pg_restore", lambda: expect(shop.state(PEER_DATABASE), states[2]))
        shard.drop_database(PEER_DATABASE)

    take_turns(
        RESTORES,
        [
            lambda _: restore("restore of increment 2", 2),
            peer,
            lambda _: restore("restore of the full snapshot", 0),
        ],
    )


def small_part(results: Results, folder: Path, say: Callable[[str], None]) -> None:
    """Measure what users try first: two shards with few rows."""
    fleet = start_fleet(folder / "small", shards=SMALL_SHARDS, backups=0, schema=False)
    try:
        allow_one_copy(fleet)
        target = fleet.fleet_toml.read_text()
        for primary in fleet.primaries:
            shard = Shard(fleet, folder, primary.id)
            shard.create_database(DATABASE)
            Shop(shard, SMALL_ROWS // SMALL_SHARDS).fill()
            target = target.replace(primary.dsn(), primary.dsn(CUTLINE_DATABASE))
        target_toml = folder / "small-target.toml"
        target_toml.write_text(target)

        def command(task: str, *words: str) -> None:
            say(task)
            run_command(results, task, fleet.fleet_toml, folder / "cache", words)

        command("small: init", "init")
        for run in range(SMALL_RUNS):
            command("small: create", "create", f"small-{run}")
            command("small: check", "check", f"small-{run}")
            replace = ["--replace"] if run else []
            command("small: restore", "restore", f"small-{run}", "--to", str(target_toml), "--yes", *replace)
    finally:
        stop_fleet(folder / "small", delete=True)


def allow_one_copy(fleet: EmbeddedFleet) -> None:
    """Let checks pass without standbys: the peers back up a single node."""
    text = fleet.fleet_toml.read_text()
    fleet.fleet_toml.write_text(f'{text}\n[check]\nallow = ["one-copy"]\n')


@dataclass(frozen=True, slots=True)
class PgBackRest:
    """pgBackRest on the shop's server. It backs up the whole server, without the WAL that a restore needs as well."""

    users: Users

    @classmethod
    def of(cls, users: Users) -> PgBackRest | None:
        """Return it if it is installed and knows the server's version."""
        if shutil.which(PGBACKREST) is None:
            return None
        found = cls(users)
        is_known = users.results.attempt(PGBACKREST, lambda: found._run("stanza-create") is not None)
        return found if is_known else None

    @property
    def repository(self) -> Path:
        """The folder that it writes to."""
        return self.users.folder / "backrest"

    def back_up(self, task: str, kind: str) -> None:
        """Take a backup as one run of `task`."""
        self.users.say(task)
        before = size_of(self.repository)
        self.users.results.measure(
            task, lambda: self._run("backup", f"--type={kind}", "--no-archive-check", "--start-fast"),
            lambda _: size_of(self.repository) - before,
        )  # fmt: skip

    def _run(self, command: str, *more: str) -> Ran:
        node = self.users.shop.shard.primary
        # It refuses options of other commands, but not in the environment.
        options = {
            "STANZA": STANZA, "REPO1_PATH": str(self.repository), "PG1_PATH": str(node.data_directory),
            "PG1_SOCKET_PATH": str(node.socket_folder), "PG1_PORT": str(PORT), "PG1_USER": SUPERUSER,
            "LOCK_PATH": str(self.users.folder / "locks"), "LOG_LEVEL_FILE": "off", "LOG_LEVEL_CONSOLE": "error",
            "PROCESS_MAX": "2", "COMPRESS_TYPE": "gz", "COMPRESS_LEVEL": "1", "REPO1_RETENTION_FULL": "9",
        }  # fmt: skip
        environment = {f"PGBACKREST_{name}": value for name, value in options.items()}
        return run_measured([PGBACKREST, *more, command], self.users.folder, environment)


def run_command(
    results: Results, task: str, fleet_toml: Path, cache: Path, words: Sequence[str]
) -> dict[str, object] | None:
    """Run `snapshot` in a process of its own as one run of `task`; return its document, None if it failed."""
    ran = measure_command(results, task, fleet_toml, cache, words)
    return None if ran is None else json.loads(ran.output)


def measure_command(results: Results, task: str, fleet_toml: Path, cache: Path, words: Sequence[str]) -> Ran | None:
    """Run `snapshot` as one run of `task`; return its time, memory and output, None if it failed."""
    command = [sys.executable, "-c", COMMAND, "--fleet", str(fleet_toml), "--json", *words]
    environment = {
        "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        # As users have it: modules are compiled once.
        "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache / "bytecode"),
    }  # fmt: skip
    ran = results.attempt(task, lambda: run_measured(command, fleet_toml.parent, environment))
    if ran is not None:
        results.add(task, ran.seconds)
        results.note_processes(task, ran.cpu_seconds, ran.peak_bytes)
    return ran


def size_of(folder: Path) -> int:
    """Return the size of all files in `folder`, in bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def expect(found: object, expected: object) -> bool:
    """Raise RuntimeError unless both are equal."""
    if found != expected:
        raise RuntimeError(f"restored {found}, expected {expected}")
    return True


def _stored_bytes(document: Mapping[str, object]) -> int:
    return int(str(document.get("bytes", 0)))
