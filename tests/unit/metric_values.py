"""Metrics read back by Prometheus's own client library, by metric and labels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from cutline.snapshots.listing import metrics
from cutline.snapshots.listing.metrics import Metric, Sample
from cutline.snapshots.listing.metrics_endpoint import render

# All metrics, in the order of their module.
METRICS: tuple[Metric, ...] = tuple(value for value in vars(metrics).values() if isinstance(value, Metric))


def values_of(text: bytes) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """The values of a text in Prometheus's format by metric and labels, without `fleet`."""
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for one in family.samples:
            labels = tuple(sorted((name, value) for name, value in one.labels.items() if name != "fleet"))
            assert labels not in found.setdefault(one.name, {})
            found[one.name][labels] = one.value
    return found


def read(samples: Iterable[Sample]) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    return values_of(render("shop", samples))


def of(metric: Metric, values: Mapping[str, Mapping[tuple[tuple[str, str], ...], float]]) -> dict[str, float]:
    """The values of a metric, by its own label's."""
    return {"/".join(value for _, value in labels): one for labels, one in values.get(metric.name, {}).items()}
