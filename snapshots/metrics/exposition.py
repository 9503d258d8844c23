"""Metrics as Prometheus reads them, by its own client library, and as a file that replaces the one before."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from snapshots.metrics.catalog import FLEET, Metric, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

# Whoever collects the file is another user.
FILE_MODE = 0o644


@dataclass(frozen=True, slots=True)
class _Collector:
    """What the client library asks for the metrics of one fleet."""

    fleet: str
    samples: tuple[Sample, ...]

    def collect(self) -> Iterator[Family]:
        """Yield every metric once, with all its samples."""
        from prometheus_client.core import GaugeMetricFamily

        by_metric: dict[Metric, list[Sample]] = {}
        for one in self.samples:
            by_metric.setdefault(one.metric, []).append(one)
        for metric, found in by_metric.items():
            family = GaugeMetricFamily(metric.name, metric.help, labels=(FLEET, *metric.labels))
            for one in found:
                family.add_metric((self.fleet, *one.labels), one.value)
            yield family


def render(fleet: str, samples: Iterable[Sample]) -> bytes:
    """The samples of a fleet in Prometheus's text format."""
    # Imported here: commands without metrics need it not.
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(fleet, tuple(samples)))
    return generate_latest(registry)


def replace_file(path: Path, text: bytes) -> None:
    """Put `text` in the place of the file, at once, readable for everybody; raises OSError, and leaves the old file.

    The name of the file that is written first does not end in `.prom`: node_exporter would read it, too.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file")
    first = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # A file that is there already is one of a process that was killed.
        first.unlink(missing_ok=True)
        with os.fdopen(os.open(first, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE), "wb") as file:
            os.fchmod(file.fileno(), FILE_MODE)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        first.replace(path)
    except BaseException:
        with suppress(OSError):
            first.unlink(missing_ok=True)
        raise
