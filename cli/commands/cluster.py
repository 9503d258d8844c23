"""`snapshot cluster`: pack Cutline for executors on other machines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cutline.cli.output.results import emit, progress
from cutline.cli.output.tables import size_text

SCHEMA = "cutline/cluster-pack/1"

cluster_app = typer.Typer(help="Pack Cutline for the executors of a Spark cluster.")


@cluster_app.callback()
def cluster() -> None:
    """Pack Cutline for the executors of a Spark cluster."""


@cluster_app.command()
def pack(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The archive to write, such as cutline.tar.gz.")],
) -> None:
    """Pack Cutline and the packages that it needs into an archive for the executors. No server is contacted.

    An existing FILE is replaced.
    """
    from cutline.spark.packing import ENDS, pack_to
    from cutline.storage.errors import UsageError

    if not file.name.endswith(ENDS):
        raise UsageError(f"{file.name} does not end with {ENDS}", hint=f"choose a name that ends with {ENDS}")
    with progress(context) as shown:
        shown.step("pack")
        packed = pack_to(file)
    settings = {
        "cutline.archive": str(packed.file),
        "pyspark.python": f"python{packed.python}",
    }
    document = {
        "schema": SCHEMA,
        "file": str(packed.file),
        "bytes": packed.size,
        "files": packed.files,
        "packages": list(packed.packages),
        "build": packed.build,
        "python": packed.python,
        "platform": packed.platform,
        "spark": settings,
    }
    lines = [
        f"packed this build and {len(packed.packages)} packages into {packed.file}: {size_text(packed.size)}",
        f"for executors with Python {packed.python} on {packed.platform}; in fleet.toml:",
        "[spark]",
        *(f'"{name}" = "{value}"' for name, value in settings.items()),
    ]
    emit(context, document, lines)
