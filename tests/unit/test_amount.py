"""Which jobs a command runs itself, and how many tasks at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from cutline.fleet import cores as fleet_cores
from cutline.spark.amount import CHANGES_MAX, CORES_AT_MOST, PAGE_BYTES_MAX, ROWS_MAX, Amount, is_for_command
from cutline.storage.location import StoreLocation

LOCAL, FOLDER = "local[2]", "file:///stores/one"
SMALL, HALF = Amount(PAGE_BYTES_MAX, ROWS_MAX, CHANGES_MAX), Amount(PAGE_BYTES_MAX // 2, ROWS_MAX // 2)


@pytest.mark.parametrize(
    ("amount", "master", "url", "expected"),
    [
        (SMALL, LOCAL, FOLDER, True),
        (SMALL, "local", "/stores/one", True),
        (Amount(0), "local[*]", "s3://bucket/one", True),
        (Amount(), LOCAL, FOLDER, False),
        (Amount(PAGE_BYTES_MAX + 1), LOCAL, FOLDER, False),
        (Amount(0, ROWS_MAX + 1), LOCAL, FOLDER, False),
        # More threads wait for each other.
        (SMALL, f"local[{CORES_AT_MOST}]", FOLDER, True),
        (SMALL, f"local[{2 * CORES_AT_MOST}]", FOLDER, False),
        (HALF, f"local[{2 * CORES_AT_MOST}]", FOLDER, True),
        (Amount(PAGE_BYTES_MAX // 2 + 1), f"local[{2 * CORES_AT_MOST}]", FOLDER, False),
        (Amount(0, ROWS_MAX // 2 + 1), f"local[{2 * CORES_AT_MOST}]", FOLDER, False),
        # But there are never more than 8.
        (HALF, "local[64]", FOLDER, True),
        (Amount(0, 0, CHANGES_MAX + 1), LOCAL, FOLDER, False),
        # Executors need no JVM on this machine, and a request to such a store can't be ended.
        (SMALL, "local-cluster[2,1,1024]", FOLDER, False),
        (SMALL, "spark://m1:7077", "s3://bucket/one", False),
        (SMALL, LOCAL, "gs://bucket/one", False),
        (SMALL, LOCAL, "az://container/one", False),
    ],
)
def test_small_jobs_of_local_masters_run_in_the_command(
    amount: Amount, master: str, url: str, *, expected: bool
) -> None:
    assert is_for_command(amount, master, StoreLocation(url, {})) == expected


def test_amounts_add_up_and_an_unknown_one_stays_unknown() -> None:
    assert Amount(1, 2, 3) + Amount(10, 20, 30) == Amount(11, 22, 33)
    assert Amount(1, 2, 3) + Amount(changes=30) == Amount(None, 2, 33)
    assert Amount() + Amount(1) == Amount()


@pytest.mark.parametrize(("limit", "cores"), [("max 100000", 6), ("150000 100000", 2), ("900000 100000", 6), ("", 6)])
def test_a_container_has_the_cores_of_its_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, cores: int
) -> None:
    path = tmp_path / "cpu.max"
    path.write_text(f"{limit}\n")
    monkeypatch.setattr(fleet_cores, "CGROUP_CPU_LIMIT", path)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)), raising=False)
    assert fleet_cores.cores_of("local[*]") == cores
    assert fleet_cores.cores_of("local[12]") == 12
