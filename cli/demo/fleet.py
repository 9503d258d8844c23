"""`snapshot demo up|load|down`: an embedded fleet to try the commands on, and its bank workload."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Annotated

import typer

from cutline.cli.output.arguments import SECONDS_MAX, command_context
from cutline.cli.output.failure import CONFLICTS, DONE
from cutline.cli.output.results import emit, progress
from cutline.cli.output.tables import count_text, name_fleet, quantity_text, seconds_text
from cutline.embedded.bank import BankInvariants, read_invariants
from cutline.embedded.bank_workload import BankWorkload
from cutline.embedded.fleet import EmbeddedFleet, is_fleet, open_fleet, programs_of, start_fleet, stop_fleet
from cutline.embedded.folder import FolderTakenError
from cutline.fleet.progress import Progress
from cutline.nodes.programs import check_programs_folder
from cutline.wal.segments.own_store import FLEET_KEY

NEW_FLEET_SHARDS = 3
NEW_FLEET_BACKUPS = 1
LOAD_SECONDS = 10.0
LOAD_CLIENTS = 4
WATCH_SECONDS = 0.25
EXAMPLES_MAX = 20

FleetFolder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the embedded fleet.")]
Shards = Annotated[
    int | None, typer.Option(min=1, max=32, metavar="N", help=f"Shards in a new fleet. Default: {NEW_FLEET_SHARDS}.")
]
Backups = Annotated[
    int | None,
    typer.Option(min=0, max=8, metavar="N", help=f"Standbys per shard in a new fleet. Default: {NEW_FLEET_BACKUPS}."),
]
PostgreSQL = Annotated[
    Path | None,
    typer.Option(
        "--postgresql",
        metavar="FOLDER",
        help="Run the PostgreSQL programs in this folder, such as /usr/lib/postgresql/16/bin.",
    ),
]
Seconds = Annotated[float, typer.Option(min=0.1, max=SECONDS_MAX, help="How long to run the workload.")]
Clients = Annotated[int, typer.Option(min=1, max=64, metavar="N", help="Number of concurrent clients.")]
Delete = Annotated[bool, typer.Option("--delete", help="Also delete the servers' data, but not the store.")]


def up(
    context: typer.Context,
    directory: FleetFolder,
    shards: Shards = None,
    backups: Backups = None,
    postgresql: PostgreSQL = None,
) -> None:
    """Create and start primaries and standbys in DIR, or restart the servers that already exist there."""
    began = time.monotonic()
    programs = check_programs_folder(postgresql) if postgresql else None
    existing = open_fleet(directory) if is_fleet(directory) else None
    was_running = len(existing.running()) if existing else 0
    shards, backups = _shape(existing, shards, backups)
    if existing and programs and programs != existing.nodes[0].programs:
        stands = existing.nodes[0]
        raise FolderTakenError(
            f"{existing.directory} contains a PostgreSQL {stands.major_version} fleet, which runs the programs"
            f" {f'in {stands.programs}' if stands.programs else 'from the wheel'}",
            hint=f"omit --postgresql, choose a different folder, or delete that fleet first: snapshot demo down"
            f" {shlex.quote(str(directory))} --delete",
        )
    with progress(context) as shown:
        shown.step("start PostgreSQL")
        fleet = start_fleet(directory, shards=shards, backups=backups, programs=programs_of(shards, programs))
    seconds = time.monotonic() - began
    started = len(fleet.nodes) - was_running
    nodes = [{"id": node.id, "backup_of": node.backup_of, "dsn": node.dsn()} for node in fleet.nodes]
    document = {
        "schema": "cutline/demo-up/2",
        "fleet": str(fleet.fleet_toml),
        "store": str(fleet.store),
        "started": started,
        "seconds": round(seconds, 3),
        "nodes": nodes,
    }
    lines = [f"{node.id:8} {node.dsn()}" for node in fleet.nodes]
    if started:
        lines.append(f"{quantity_text(started, 'servers')} started in {seconds:.1f} s")
    else:
        lines.append("the fleet was already running; nothing was changed")
    lines.append("next: snapshot list" if (fleet.store / FLEET_KEY).exists() else "next: snapshot init")
    emit(context, document, [name_fleet(line, str(fleet.fleet_toml)) for line in lines])


def load(
    context: typer.Context,
    directory: FleetFolder,
    *,
    seconds: Seconds = LOAD_SECONDS,
    clients: Clients = LOAD_CLIENTS,
) -> None:
    """Run the bank workload on the fleet in DIR, then verify that the books balance.

    Every other transfer spans two shards, using two-phase commit. Ctrl-C ends the workload early and cleanly.
    """
    fleet = open_fleet(directory)
    dsns = fleet.dsns()
    workload = BankWorkload(dsns, clients=clients, names=[primary.id for primary in fleet.primaries])
    interrupt: KeyboardInterrupt | None = None
    with progress(context) as shown, workload:
        began = time.monotonic()
        try:
            _watch(workload, shown, seconds)
        except KeyboardInterrupt as error:
            interrupt = error
    seconds = time.monotonic() - began
    invariants = read_invariants(dsns)
    code = DONE if invariants.hold else CONFLICTS
    if interrupt is None or not command_context(context).json:
        document, lines = _load_document(workload, seconds, invariants), _load_lines(workload, seconds, invariants)
        emit(context, document, lines, code=code)
    if interrupt is not None:
        raise interrupt
    if code:
        raise typer.Exit(code)


def down(context: typer.Context, directory: FleetFolder, *, delete: Delete = False) -> None:
    """Stop the servers that `demo up DIR` started; their data is kept."""
    fleet = open_fleet(directory)
    with progress(context) as shown:
        shown.step("stop PostgreSQL")
        stopped = stop_fleet(directory, delete=delete)
    document = {"schema": "cutline/demo-down/1", "stopped": stopped, "deleted": delete}
    lines = [f"{quantity_text(stopped, 'servers')} stopped" if stopped else "no servers were running"]
    if delete:
        lines.append("their data is deleted")
        if fleet.store.exists():
            lines.append(f"the snapshots remain in {fleet.store}")
    emit(context, document, lines)


def _shape(existing: EmbeddedFleet | None, shards: int | None, backups: int | None) -> tuple[int, int]:
    there_shards, there_backups = NEW_FLEET_SHARDS, NEW_FLEET_BACKUPS
    if existing:
        there_shards = len(existing.primaries)
        there_backups = len(existing.nodes) // there_shards - 1
    return (
        there_shards if shards is None else shards,
        there_backups if backups is None else backups,
    )


def _watch(workload: BankWorkload, shown: Progress, seconds: float) -> None:
    if workload.settled:
        shown.note(f"settled {workload.settled} transfers that an earlier load left prepared")
    shown.step("move money", unit="transactions")
    deadline = time.monotonic() + seconds
    counted = 0
    while (left := deadline - time.monotonic()) > 0 and workload.wait(min(left, WATCH_SECONDS)):
        committed = workload.committed.total
        shown.advance(committed - counted)
        counted = committed


def invariants_document(invariants: BankInvariants) -> dict[str, object]:
    """Return the state of the bank's books for `--json`."""
    return {
        "hold": invariants.hold,
        "total_balance": invariants.total_balance,
        "expected_total": invariants.expected_total,
        "transfers": list(invariants.transfers),
        "half_present": len(invariants.half_present),
        "half_present_examples": list(invariants.half_present[:EXAMPLES_MAX]),
        "unexplained_accounts": len(invariants.unexplained_accounts),
        "unexplained_accounts_examples": list(invariants.unexplained_accounts[:EXAMPLES_MAX]),
    }


def _load_document(workload: BankWorkload, seconds: float, invariants: BankInvariants) -> dict[str, object]:
    committed = workload.committed
    return {
        "schema": "cutline/demo-load/1",
        "seconds": round(seconds, 3),
        "clients": workload.clients,
        "transactions": {"local": committed.local, "cross": committed.cross},
        "transactions_per_second": round(committed.total / seconds, 1),
        "p99_seconds": workload.latencies.p99_seconds(),
        "longest_seconds": workload.latencies.longest_between(),
        "invariants": invariants_document(invariants),
    }


def _load_lines(workload: BankWorkload, seconds: float, invariants: BankInvariants) -> list[str]:
    committed = workload.committed
    lines = [
        f"{count_text(committed.total)} transactions in {seconds_text(seconds)}, "
        f"{count_text(round(committed.total / seconds))} per second: "
        f"{count_text(committed.local)} within a shard, {count_text(committed.cross)} across two"
    ]
    p99, longest = workload.latencies.p99_seconds(), workload.latencies.longest_between()
    if p99 is not None and longest is not None:
        lines.append(f"99 of 100 took at most {p99 * 1000:.1f} ms, the longest {longest * 1000:.1f} ms")
    total, expected = count_text(invariants.total_balance), count_text(invariants.expected_total)
    if invariants.hold:
        return [*lines, f"the bank's books balance: {total} in all, and no transfer is on only one of its shards"]
    return [
        *lines,
        f"the bank's books DO NOT BALANCE: {total} in all instead of {expected}, "
        f"{count_text(len(invariants.half_present))} transfers not on all of their shards, "
        f"{count_text(len(invariants.unexplained_accounts))} balances not explained by transfers",
    ]
