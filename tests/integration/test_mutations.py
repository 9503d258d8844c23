"""No changed value of a stored document ends a command in a traceback, hangs it, or changes a restore unnoticed.

tests/mutations makes and tries the changes. Here a sample of them is tried, and some of those that succeeded as attacks
once; in the long form all of them.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from cutline.check.report import CheckReport
from cutline.check.verify import CheckRequest, check_snapshots
from cutline.embedded.fleet import EmbeddedFleet
from cutline.fleet.progress import Silent
from cutline.snapshots.ddl.contradictions import DdlContradictedError
from tests.commands.in_process import run_here
from tests.commands.snapshot_runs import Ready, Runs
from tests.mutations.sealing import planted, resealed
from tests.mutations.table import Trial
from tests.mutations.trial import ACCEPTED, COMMANDS, REFUSED, run_command
from tests.mutations.values import TO_KNOWN, TO_UNKNOWN, TWICE
from tests.mutations.world import NAME, copies_of, made_world
from tests.run.soak import SEED, SOAK_SECONDS, first

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAMPLE = 24
FULL, FIRST, LAST = (
    f"snapshots/{NAME}/{key}"
    for key in ("snapshot.json", "increments/0000000000000001.json", "increments/0000000000000002.json")
)
Document = dict[str, Any]


@pytest.fixture(scope="module")
def trial(
    shared_fleet: EmbeddedFleet, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trial]:
    with made_world(shared_fleet, tmp_path_factory.mktemp("mutations"), Ready(spark)) as world:
        yield Trial.of(world, SEED)


@contextmanager
def changed(trial: Trial, key: str, change: Callable[[Document], object]) -> Iterator[None]:
    """The store with one document changed and sealed again, as somebody without a key does it."""
    document = copy.deepcopy(trial.documents[key])
    change(document)
    assert document != trial.documents[key]
    with planted(trial.world.store, resealed(trial.documents, key, document)):
        yield


def check(trial: Trial) -> CheckReport:
    return check_snapshots(trial.world.fleet, CheckRequest(NAME), trial.world.spark, Silent())


def test_every_document_in_the_store_is_accepted_as_it_is(trial: Trial) -> None:
    assert {trial.originals[NAME, command].kind for command in COMMANDS} == {ACCEPTED}
    assert trial.recipe is not None


@pytest.mark.timeout(0 if SOAK_SECONDS else 180)
def test_no_changed_value_ends_in_a_traceback_hangs_or_is_shown_as_true(trial: Trial) -> None:
    cases = trial.cases()
    assert len(cases) > 10_000
    trial.run(cases if SOAK_SECONDS else cases[:SAMPLE])
    sys.stdout.write("\n".join([*trial.lines(), ""]))
    assert not trial.failed, "\n".join(trial.failed)


@pytest.mark.timeout(0 if SOAK_SECONDS else 180)
def test_no_value_under_another_key_ends_in_a_traceback_hangs_or_is_shown_as_true(trial: Trial) -> None:
    """Few of all cases are of this kind."""
    cases = [one for one in trial.cases() if one.way in (TO_KNOWN, TO_UNKNOWN)]
    assert len(cases) > 200
    trial.run(cases if SOAK_SECONDS else cases[:SAMPLE])
    assert not trial.failed, "\n".join(trial.failed)


def objects_of(document: Document, kind: str, node: str) -> Document:
    return next(one for one in document["objects"] if (one["kind"], one["node"]) == (kind, node))


def set_position(document: Document) -> None:
    document["cut"]["nodes"][0]["position"] = "0/0"


REFUSED_ATTACKS: dict[str, tuple[str, Callable[[Document], object], str]] = {
    "no succession": (FIRST, lambda d: d["schema_changes"]["successions"].update(s1={}), "copied"),
    "another succession": (
        FIRST,
        lambda d: d["schema_changes"]["successions"].update(
            s1=dict(zip(d["schema_changes"]["successions"]["s1"], (3, 1), strict=True))
        ),
        "successions",
    ),
    "a table goes": (FIRST, lambda d: d["schema_changes"]["gone"]["s1"].append(5), "counts.groups"),
    "a table stays": (FIRST, lambda d: d["schema_changes"]["gone"]["s1"].pop(), "counts.groups"),
    "fewer rows": (FULL, lambda d: objects_of(d, "base", "s1")["rows"].update({"1": 39}), "counts.rows"),
    "another kind": (FULL, lambda d: objects_of(d, "base", "s1").update(kind="large_objects"), "kind"),
    "no such kind": (FULL, lambda d: objects_of(d, "base", "s1").update(kind="baze"), "kind"),
    "another node": (FULL, lambda d: objects_of(d, "base", "s1").update(node="s2"), "node"),
    "an object less": (FULL, lambda d: d["objects"].pop(0), "counts"),
    "no changes": (FIRST, lambda d: d["segments"]["s1"][0].update(changes=0, partials=0), "counts.changes"),
    "a group twice": (FULL, lambda d: d["groups"]["s1"].append(d["groups"]["s1"][0]), "twice"),
    "a line in a missing value": (
        FIRST, lambda d: d["schema_changes"]["groups"]["s1"][0]["columns"][3].update(missing="3\n9\t9"), "missing",
    ),
    "another column": (FULL, lambda d: d["groups"]["s1"][0]["columns"][1].update(number=9), "numbers of its columns"),
    "an unknown encoding": (FULL, lambda d: [one.update(encoding="") for one in d["baseline"]], "encoding"),
    "a position before the base": (LAST, set_position, "cut"),
    "a key twice": (FULL, lambda d: d.update({f"{TWICE}comment": "another"}), "twice"),
    "a key twice below": (FULL, lambda d: d["base"].update({f"{TWICE}s1": "0/1"}), "twice"),
    "a megabyte of comment": (FULL, lambda d: d.update(comment="x" * 1_000_000), "comment"),
    "endless seconds": (FULL, lambda d: d.update(seconds=10**400), "seconds"),
    "a time that UTC lacks": (FULL, lambda d: d.update(created_at="0001-01-01T00:00:00+14:00"), "created_at"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED_ATTACKS)
def test_a_commit_that_contradicts_itself_is_refused_by_every_command(trial: Trial, name: str) -> None:
    key, change, reason = REFUSED_ATTACKS[name]
    with changed(trial, key, change):
        outcomes = [run_command(trial.world, NAME, command) for command in COMMANDS]
    assert {one.kind for one in outcomes} == {REFUSED}
    assert [one.code for one in outcomes] == [0, 3, 1, 3]
    message = outcomes[1].document["message"]
    # A change of the full snapshot may show in an increment.
    assert f"object snapshots/{NAME}/" in message
    assert reason in message


CREATE_ATTACKS: dict[str, tuple[str, Callable[[Document], object], str]] = {
    "an id of no node": (LAST, lambda d: d.update(renamed={"s9": "other"}), "renamed names s9"),
    # An increment does not prove the commits before the newest one.
    "tables of no shard": (
        FIRST,
        lambda d: d["schema_changes"]["tables"].update(s9=d["schema_changes"]["tables"].pop("s1")),
        "schema_changes names a node that is not in the snapshot",
    ),
}


@pytest.mark.parametrize("name", CREATE_ATTACKS)
def test_an_increment_names_the_commit_that_contradicts_the_others(trial: Trial, name: str) -> None:
    key, change, reason = CREATE_ATTACKS[name]
    with changed(trial, key, change):
        code, document = run_here(trial.world.fleet, "create", NAME, "--incremental", "--dry-run")
    assert (code, document["error"]) == (3, "manifest")
    assert f"object {key}" in document["message"]
    assert reason in document["message"]


def later_position(document: Document) -> None:
    """The cut of s1 one byte later than its WAL says."""
    one = document["cut"]["nodes"][0]
    high, low = one["position"].split("/")
    one["position"] = f"{high}/{int(low, 16) + 1:X}"


ATTACKS_FOUND: dict[str, tuple[str, Callable[[Document], object], str]] = {
    "another position": (LAST, later_position, "cut"),
    "no truncates": (LAST, lambda d: d["segments"]["s1"][0].update(truncates=0), "rows"),
    "rows of a standby": (FULL, lambda d: objects_of(d, "base", "s1-b1")["rows"].update({"1": 39}), "rows"),
    "another end of a transaction": (LAST, lambda d: d["cut"]["nodes"][0].update(undecided=[]), "cut"),
}


@pytest.mark.parametrize("name", first(ATTACKS_FOUND))
def test_what_only_the_objects_contradict_is_found_by_a_check(trial: Trial, name: str) -> None:
    key, change, kind = ATTACKS_FOUND[name]
    with changed(trial, key, change):
        report = check(trial)
    assert report.exit_code == 1
    assert kind in {one.kind for one in report.snapshots[0].conflicts}


def test_the_chain_is_valid_as_it_is(trial: Trial) -> None:
    report = check(trial)
    assert (report.result, report.exit_code) == ("valid", 0), report.to_json()


def without_sequence(document: Document) -> None:
    document["sequences"]["s1"] = []


def with_renamed_column(document: Document) -> None:
    for shard in ("s1", "s2"):
        document["groups"][shard][-1]["columns"][-1]["name"] = "renamed"


@pytest.mark.parametrize(
    ("key", "change", "reason"),
    [
        (LAST, without_sequence, "the commit has no value for sequence public.counter"),
        (FULL, with_renamed_column, "renamed in the commit, but"),
    ],
)
def test_a_restore_compares_the_commit_with_the_stored_ddl(
    trial: Trial, key: str, change: Callable[[Document], object], reason: str
) -> None:
    """And a check reports each contradiction in the words of the restore's message."""
    world = trial.world
    with changed(trial, key, change):
        with pytest.raises(DdlContradictedError, match=reason) as refused:
            Runs(world.fleet, world.spark).restore(NAME, world.target)
        report = check(trial)
    assert refused.value.exit_code == 3
    assert [one for one in report.snapshots[0].conflicts if one.kind == "definition" and reason in one.detail]


def with_impossible_value(document: Document) -> None:
    document["sequences"]["s1"][0]["last_value"] = 0


def with_sequences(*named: tuple[str, str]) -> Callable[[Document], object]:
    """Name further sequences, which are none."""

    def change(document: Document) -> None:
        sequences = document["sequences"]["s1"]
        sequences += [sequences[0] | {"schema": schema, "name": name} for schema, name in named]

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    first([
        (with_impossible_value, "sequence public.counter has value 0 in the commit, but the DDL allows values from 1"),
        (with_sequences(("public", "wide")), "the DDL does not create sequence public.wide"),
        (with_sequences(("nowhere", "s")), "the DDL does not create sequence nowhere.s"),
        (with_sequences(("public", "a.b.c.d")), 'the DDL does not create sequence public."a.b.c.d"'),
    ]),
)  # fmt: skip
def test_a_value_that_a_sequence_can_not_have_is_refused(
    trial: Trial, change: Callable[[Document], object], reason: str
) -> None:
    world = trial.world
    with changed(trial, LAST, change), pytest.raises(DdlContradictedError, match=re.escape(reason)):
        Runs(world.fleet, world.spark).restore(NAME, world.target)


def test_the_chain_is_restored_as_it_is(trial: Trial) -> None:
    world = trial.world
    Runs(world.fleet, world.spark).restore(NAME, world.target)
    # A transaction that is prepared at the last cut is committed since: it is not in the restored state.
    restored, source = copies_of(world.target), copies_of(world.fleet)
    for shard, tables in source.items():
        assert restored[shard].keys() == tables.keys()
        assert {name for name in tables if restored[shard][name] != tables[name]} == {"public.wide"}
