"""`--metrics FILE` and `[metrics] file`: when a command ends, its fleet's metrics replace the file's contents.

This also happens if the command failed or was interrupted. If the file can't be written, the command warns, but does
not fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Struct, field

from cutline.cli.output.arguments import command_context
from cutline.cli.output.failure import DONE
from cutline.fleet.config import Fleet
from cutline.fleet.own_files import replaced_file
from cutline.snapshots.operations.operation import code_of
from cutline.storage.clock import utc_now
from cutline.storage.errors import UsageError, find_behind

MetricsFile = Annotated[
    Path | None,
    typer.Option(
        "--metrics",
        metavar="FILE",
        help="Write Prometheus metrics to FILE at the end. Default: the file in fleet.toml.",
        show_default=False,
    ),
]
# The collector that reads the file runs as a different user.
FILE_MODE = 0o644
# After Ctrl-C, the user is waiting for the command to end.
INTERRUPTED_SECONDS_MAX = 3.0


class _Run(Struct):
    command: str
    began: float = field(default_factory=time.monotonic)
    code: int = DONE
    seconds_max: float | None = None


@contextmanager
def leaving_metrics(
    context: typer.Context, fleet: Fleet, command: str, file: Path | None, *, is_dry: bool = False
) -> Iterator[None]:
    """At the end of the block, write the metrics to `file`, else to the file in fleet.toml, unless the run `is_dry`."""
    path = file or fleet.metrics.file
    if path is None or is_dry:
        yield
        return
    run = _Run(command)
    try:
        yield
    except BaseException as error:
        run.code = error.exit_code if isinstance(error, typer.Exit) else code_of(error)
        if find_behind(error, KeyboardInterrupt) is not None:
            run.seconds_max = INTERRUPTED_SECONDS_MAX
        raise
    finally:
        _write(context, fleet, path, run)


def replace_metrics(path: Path, text: bytes) -> None:
    """Replace the file with these metrics, atomically; on failure, leave the old file and raise UsageError.

    The temporary file is hidden and has a different extension: otherwise node_exporter would read it, too.
    """
    with replaced_file(path, FILE_MODE) as write:
        write(text.decode())


def _write(context: typer.Context, fleet: Fleet, path: Path, run: _Run) -> None:
    seconds, ended_at = time.monotonic() - run.began, utc_now().timestamp()
    warn = command_context(context).warn
    try:
        # Imported here: only commands that leave metrics need these.
        from cutline.snapshots.listing import metrics
        from cutline.snapshots.listing.metrics_endpoint import render
        from cutline.snapshots.listing.metrics_gathering import GATHERING_SECONDS_MAX, gather_once

        gathered = gather_once(fleet, run.seconds_max or GATHERING_SECONDS_MAX)
        own = [
            metrics.COMMAND_END.of(ended_at, run.command),
            metrics.COMMAND_SECONDS.of(seconds, run.command),
            metrics.COMMAND_CODE.of(run.code, run.command),
        ]
        replace_metrics(path, render(fleet.name, [*gathered.samples, *own]))
    except UsageError as error:
        warn(f"the metrics could not be written to {error.message}")
    except KeyboardInterrupt:
        # The command has ended: an interrupt can no longer change its result.
        warn(f"the metrics were not written to {path}: interrupted")
