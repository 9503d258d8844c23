"""Metrics as Prometheus reads them, by its own client library."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cutline.snapshots.metrics.catalog import FLEET, Metric, Sample

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family


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
