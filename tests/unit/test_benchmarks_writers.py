"""The figures of the writers' benchmark, computed from hand-made latencies."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.writers.bank import Clients
from benchmarks.writers.measure import WITH_CUTS, WITHOUT_CUTS, WriterFigures, distribution

# MANY: one transaction per millisecond; the n-th takes n µs. STALLED: one more begins at 0.5 s and takes 2 s.
MANY = Clients(np.arange(1000) / 1000, np.arange(1, 1001) / 1_000_000)
STALLED = Clients(np.append(MANY.starts, 0.5), np.append(MANY.seconds, 2.0))


def test_a_transaction_counts_in_the_window_in_which_it_began() -> None:
    found = distribution(MANY, [(0.0, 0.1), (0.2, 0.3)])
    # The 1st to the 100th and the 201st to the 300th: of 200, the 101st, the 199th and the last.
    assert found.transactions == 200
    figures = (found.p50_seconds, found.p99_seconds, found.p999_seconds, found.longest_seconds)
    assert np.allclose(figures, np.array([201, 299, 300, 300]) / 1e6, atol=1.5e-6)
    assert found.longest_median_seconds == pytest.approx(200 / 1e6)
    assert distribution(STALLED, [(0.5, 0.6)]).longest_seconds == 2.0
    assert distribution(STALLED, [(0.6, 0.7)]).longest_seconds < 0.001


def test_overlapping_counts_every_transaction_that_ran_in_the_window() -> None:
    assert distribution(STALLED, [(0.9, 0.91)], overlapping=True).longest_seconds == 2.0
    assert distribution(STALLED, [(0.4, 0.45)], overlapping=True).longest_seconds < 0.001
    with pytest.raises(RuntimeError, match="no transaction"):
        distribution(STALLED, [(3.0, 4.0)], overlapping=True)


def test_a_ratio_needs_both_measurements() -> None:
    figures = WriterFigures({WITH_CUTS: distribution(STALLED, [(0.5, 0.6)])})
    assert figures.ratio(WITH_CUTS, WITHOUT_CUTS, "longest_seconds") is None
    figures.latencies[WITHOUT_CUTS] = distribution(STALLED, [(0.999, 1.0)])
    assert figures.ratio(WITH_CUTS, WITHOUT_CUTS, "longest_seconds") == pytest.approx(2000)
