"""Try the kinds of damage on a fleet of their own, or check clean chains: see the package's docstring for the options.

Ctrl-C ends the trial and prints what was tried until then.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from cutline.embedded.fleet import start_fleet, stop_fleet
from cutline.spark.start import start_spark_at
from tests.commands.snapshot_runs import Ready
from tests.damage_matrix import page
from tests.damage_matrix.clean import check_clean
from tests.damage_matrix.families import all_kinds
from tests.damage_matrix.kinds import Kind
from tests.damage_matrix.missed import read_missed, write_missed
from tests.damage_matrix.sample import fixed_sample
from tests.damage_matrix.trial import Result, Trials
from tests.damage_matrix.world import made_world
from tests.fuzz.ground import CASES_AT_ONCE, ground_in
from tests.run.quick_spark import SETTINGS
from tests.run.soak import SEED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SHOWN_EVERY = 50


def arguments(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.damage_matrix")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="try the kinds whose ids match")
    parser.add_argument("--fixed", action="store_true", help="try the fixed sample of `make test`")
    parser.add_argument("--list", action="store_true", help="print the ids of the kinds, and try nothing")
    parser.add_argument("--write", action="store_true", help="write missed.txt and the page after a run of all kinds")
    parser.add_argument("--page", action="store_true", help="write the page by the declared outcomes, and try nothing")
    parser.add_argument("--clean", type=int, metavar="NUMBER", help="check this many snapshots of random databases")
    parser.add_argument("--standbys", type=int, default=0, help="with --clean: the standbys of each shard, 0 or 1")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    """Return 1 if a result differs from the declared outcome and is not known to be missed."""
    given = arguments(words)
    kinds = [kind for kind in all_kinds() if not given.only or any(fnmatchcase(kind.id, one) for one in given.only)]
    kinds = fixed_sample(kinds, read_missed()) if given.fixed else kinds
    if given.list:
        sys.stdout.writelines(f"{kind.id}\n" for kind in kinds)
        return 0
    if given.page:
        page.PATH.write_text(page.page_of(kinds, read_missed()), encoding="utf-8")
        return 0
    with tempfile.TemporaryDirectory(prefix="damage-matrix-") as name, _spark() as spark:
        if given.clean:
            return _check_clean(Path(name), spark, given.clean, given.standbys)
        results = _try(Path(name), spark, kinds)
    missed = [result.kind.id for result in results if result.is_missed]
    if given.write:
        write_missed(missed)
        page.PATH.write_text(page.page_of(all_kinds(), set(missed)), encoding="utf-8")
    known = read_missed()
    wrong = [result for result in results if bool(result.problem) != (result.kind.id in known)]
    sys.stdout.writelines(f"missed: {one.kind.id}: {one.problem}\n" for one in results if one.is_missed)
    sys.stdout.writelines(f"WRONG: {one.kind.id}: {one.problem or 'it is found now'}\n" for one in wrong)
    counts = Counter(page.outcome_of(result.kind, set(missed)) for result in results)
    sys.stdout.write(f"{len(results)} kinds: {', '.join(f'{count} {name}' for name, count in counts.items())}\n")
    return 1 if wrong else 0


@contextmanager
def _spark() -> Iterator[SparkSession]:
    with start_spark_at("local[2]", SETTINGS, "matrix") as start:
        yield start.session()


def _try(folder: Path, spark: SparkSession, kinds: Sequence[Kind]) -> list[Result]:
    interrupts: list[int] = []
    began, known = time.monotonic(), read_missed()
    results: list[Result] = []

    def note(result: Result) -> None:
        results.append(result)
        if result.problem and result.kind.id not in known:
            sys.stderr.write(f"{result.kind.id}: {result.problem}\n")
        if len(results) % SHOWN_EVERY == 0:
            sys.stderr.write(f"{len(results)} of {len(kinds)} kinds after {time.monotonic() - began:.0f} s\n")
        if interrupts:
            raise KeyboardInterrupt

    servers = start_fleet(folder / "fleet", shards=2, backups=1, settings={"fsync": "off"})
    (folder / "world").mkdir()
    # In the middle of a command it would be taken for what the command does.
    before = signal.signal(signal.SIGINT, lambda number, _frame: interrupts.append(number))
    try:
        with made_world(servers, folder / "world", Ready(spark)) as world:
            sys.stderr.write(f"the clean chains are made after {time.monotonic() - began:.0f} s\n")
            began = time.monotonic()
            Trials(world).run(kinds, note)
    except KeyboardInterrupt:
        sys.stderr.write(f"interrupted after {len(results)} kinds\n")
    finally:
        signal.signal(signal.SIGINT, before)
        stop_fleet(folder / "fleet", delete=True)
    return results


def _check_clean(folder: Path, spark: SparkSession, count: int, standbys: int) -> int:
    with ground_in(folder, spark, standbys) as ground:
        printed = 0
        for report in check_clean(ground, SEED, count, CASES_AT_ONCE[standbys]):
            sys.stdout.writelines(f"{line}\n" for line in [str(report), *report.alarms[printed:]])
            sys.stdout.flush()
            printed = len(report.alarms)
    return 1 if report.alarms else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
