"""The sections of a report, in their order, and the time that their rows are drawn over."""

from __future__ import annotations

from cutline.cli.output.format import quantity_text
from cutline.cli.report.drawing import Extent, Section, extent_of
from cutline.cli.report.lag_section import lag_section
from cutline.cli.report.operation_sections import operation_sections
from cutline.cli.report.point_sections import point_sections
from cutline.snapshots.listing.figures import StoreFigures


def sections_of(figures: StoreFigures) -> list[Section]:
    """All sections."""
    return [*point_sections(figures), *operation_sections(figures), lag_section(figures)]


def counts_text(figures: StoreFigures) -> str:
    """`1 snapshot, 3 restore points`."""
    return (
        f"{quantity_text(len(figures.snapshots), 'snapshots')}, {quantity_text(len(figures.points), 'restore points')}"
    )


def extent_of_points(figures: StoreFigures) -> Extent | None:
    """From the first cut to the newest; None without any."""
    return extent_of(point.cut_at for point in figures.points)
