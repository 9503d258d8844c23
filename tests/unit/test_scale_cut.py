"""The scale benchmark measures what it claims: the fleets that it generates have the expected cuts."""

from __future__ import annotations

import pytest

from benchmarks.scale_cut import CHAIN, RESOLVE, Figure, growth, write_wave
from benchmarks.scale_cut_fleet import RECORD_BYTES, START, chain_windows, in_flight_windows
from benchmarks.scale_cut_servers import simulated_nodes
from cutline.wal.cut.resolve import resolve


@pytest.mark.parametrize(("nodes", "links"), [(2, 7), (10, 500), (100, 40)])
def test_a_chain_raises_one_node_after_the_other(nodes: int, links: int) -> None:
    cut = resolve(chain_windows(nodes, links))
    assert cut.global_transactions == links
    # The last link that ends on a node determines its position.
    expected = [START] * nodes
    for link in range(links):
        expected[(link + 1) % nodes] = START + (2 * link + 2) * RECORD_BYTES
    assert [part.position for part in cut.nodes] == expected


def test_half_of_the_transactions_in_flight_are_included_early() -> None:
    cut = resolve(in_flight_windows(10, 2000))
    assert (cut.in_flight, cut.included_early, cut.global_transactions) == (2000, 1000, 1000)
    assert sum(len(part.undecided) for part in cut.nodes) == 2 * 1000


def test_a_single_node_has_only_uncommitted_transactions_in_flight() -> None:
    cut = resolve(in_flight_windows(1, 2000))
    assert (cut.in_flight, cut.included_early, cut.global_transactions) == (1000, 0, 1000)


def test_simulated_nodes_answer_the_wave() -> None:
    with simulated_nodes() as port:
        figure = write_wave(20, port)
    assert figure.nodes == 20
    assert figure.note.startswith("20 answers")


def test_growth_compares_the_largest_fleet_with_a_tenth_of_it() -> None:
    figures = [Figure(RESOLVE, nodes, 1.0, nodes / 500, 0, "") for nodes in (10, 100, 1000)]
    assert growth(figures, RESOLVE) == 10
    assert growth(figures[:1], RESOLVE) is None
    assert growth(figures, CHAIN) is None
