"""The kinds of documents: each has its own keys, and docs/format/ has its current JSON Schema."""

from __future__ import annotations

import json
from functools import reduce
from importlib.metadata import version
from operator import or_
from pathlib import Path

import pytest

from cutline.snapshots.records.background_records import steps_prefix
from cutline.snapshots.records.documents import ManifestError, list_prefix, parse_document, seal, unseal
from cutline.snapshots.records.end_marks import end_key
from cutline.snapshots.records.kinds import KINDS, DocumentKind, json_schemas
from cutline.snapshots.records.merge_records import begin_key, merge_key
from cutline.snapshots.records.operation_records import operation_key
from cutline.snapshots.records.pins import pin_key, release_key
from cutline.snapshots.records.proven_chains import commit_key
from cutline.snapshots.records.repair_records import repair_key
from cutline.snapshots.records.store_identity import FLEET_KEY, baseline_key
from cutline.snapshots.records.tombstones import only_full_key, tombstone_key
from tests.stores.documents import kind_of

FORMATS = Path(__file__).parent.parent.parent / "docs" / "format"
KEYS = {
    "fleet": (FLEET_KEY,),
    "baseline": (baseline_key(1),),
    "snapshot": (commit_key("daily", 0), commit_key("daily", 0, turn=2)),
    "increment": (commit_key("daily", 7), commit_key("daily", 7, turn=3)),
    "objects": (f"{list_prefix('daily', 'a', '20261120T000000Z-0000000001')}/base-000000-0123abcd.json",),
    "repair": (repair_key("daily", 1),),
    "merge": (merge_key("daily", 7), merge_key("daily", 7, turn=2)),
    "begin": (begin_key("daily", 7),),
    "merge-part": (operation_key("20261120T000000Z-0000000001", "merged-000000"),),
    "unfinished-base": (operation_key("20261120T000000Z-0000000001", "base-1"),),
    "copied-ranges": (operation_key("20261120T000000Z-0000000001", "copied-1-000000"),),
    "copy-step": (f"{steps_prefix('daily', 'a', '20261120T000000Z-0000000001')}/0000000001000028-0123abcd.json",),
    "resumption": (operation_key("20261120T000000Z-0000000001", "resumed-1"),),
    "ended": (end_key("daily", "20261120T000000Z-0000000001"),),
    "deleted": (tombstone_key("daily"), only_full_key("daily")),
    "pin": (
        pin_key("daily", "20261120T000000Z-000000000a"),
        release_key("daily", "20261120T000000Z-000000000a"),
    ),
    "intent": (operation_key("20261120T000000Z-0000000001", "intent"),),
    "outcome": (operation_key("20261120T000000Z-0000000001", "outcome"),),
    "failure": (
        operation_key("20261120T000000Z-0000000001", "failure"),
        operation_key("20261120T000000Z-0000000001", "interrupted-1"),
    ),
    "decision": (operation_key("20261120T000000Z-0000000001", "decision"),),
    "sign": (operation_key("20261120T000000Z-0000000001", "sign-1"),),
    "cancel": (operation_key("20261120T000000Z-0000000001", "cancel-1"),),
    "key": ("keys/0000000000000001.json",),
    "lease": (operation_key("20261120T000000Z-0000000001", "lease-1"),),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_determines_the_kind_of_its_document(name: str) -> None:
    for key in KEYS[name]:
        kind = kind_of(key)
        assert kind is not None
        assert kind.name == name


def test_every_kind_has_a_key_and_no_other_key_has_a_kind() -> None:
    assert {kind.name for kind in KINDS} == KEYS.keys()
    assert kind_of("snapshots/daily/base/a/op/part-000000.parquet") is None
    assert kind_of("operations/x/progress.json") is None


@pytest.mark.skipif(version("msgspec").startswith("0.19"), reason="it writes other schemas than those that are locked")
def test_the_schemas_in_the_docs_are_the_current_ones() -> None:
    written = {path.stem: json.loads(path.read_text()) for path in FORMATS.glob("*.json")}
    assert written == json.loads(json.dumps(json_schemas())), "run: make schemas"


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.is_sealed], ids=lambda kind: kind.name)
def test_a_newer_format_of_every_kind_is_refused_by_name(kind: DocumentKind) -> None:
    """docs/release.md: a version that can't read a document names it, and the version that may have written it."""
    (key, *_) = KEYS[kind.name]
    body = seal({"schema": f"cutline/{kind.name}/9", "novel": 1})
    with pytest.raises(ManifestError) as refused:
        parse_document(key, unseal(key, body)[0], reduce(or_, kind.types))
    assert key in refused.value.message
    assert "a newer version of Cutline may have written it" in refused.value.hint
