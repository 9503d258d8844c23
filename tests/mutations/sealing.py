"""Seal changed documents as somebody does who knows how, but has no key: every digest in the store fits again."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cutline.storage.digest import digest
from tests.mutations.values import text_of
from tests.stores.history import relink

COMMIT = re.compile(r"snapshots/([^/]+)/(snapshot\.json|increments/(\d{16})\.json)")


def seal_text(text: str) -> bytes:
    """The bytes of a document with this text, which need not be valid JSON, and its digest."""
    return f'{text[:-1]},"digest":"{digest(text.encode())}"}}'.encode()


def seal_document(document: Mapping[str, Any]) -> bytes:
    """Seal the document."""
    return seal_text(text_of({name: value for name, value in document.items() if name != "digest"}))


def commits_of_chain(key: str, keys: Iterable[str]) -> list[str]:
    """The commits of the chain of the commit `key`, in order; none if it is no commit."""
    found = COMMIT.fullmatch(key)
    matches = [match for one in keys if found and (match := COMMIT.fullmatch(one)) and match[1] == found[1]]
    # The full snapshot's key sorts after those of increments.
    return [match[0] for match in sorted(matches, key=lambda one: one[3] or "")]


def later_commits(key: str, keys: Iterable[str]) -> list[str]:
    """The commits of the same chain after the commit `key`, in order; none if it is no commit."""
    commits = commits_of_chain(key, keys)
    return commits[commits.index(key) + 1 :] if commits else []


def resealed(documents: Mapping[str, Any], key: str, changed: Mapping[str, Any]) -> dict[str, bytes]:
    """The bytes of the changed document, and of all later commits and merges of its chain with digests that fit."""
    bodies = {key: seal_document(changed)}
    commits = commits_of_chain(key, documents) or [key]
    place = commits.index(key)
    before = [dict(documents[one]) for one in commits[:place]]
    before.append({**changed, "digest": _digest_of(bodies[key])})
    for later in commits[place + 1 :]:
        document = dict(documents[later])
        relink(document, before)
        bodies[later] = seal_document(document)
        before.append({**document, "digest": _digest_of(bodies[later])})
    return bodies | _merges_of(documents, bodies)


def _merges_of(documents: Mapping[str, Any], bodies: Mapping[str, bytes]) -> dict[str, bytes]:
    """The merges of the commits that have new bytes, and the marks of all merges that have."""
    found: dict[str, bytes] = {}
    for key, document in documents.items():
        folder, _, kind = key.rpartition("/")[0].rpartition("/")
        if kind == "merges" and key not in bodies:
            commits = {"full": f"{folder}/snapshot.json", "commit": f"{folder}/increments/{key.rpartition('/')[2]}"}
            digests = {name: _digest_of(bodies[one]) for name, one in commits.items() if one in bodies}
            if digests:
                found[key] = seal_document({**document, **digests})
    for key, body in {**bodies, **found}.items():
        mark = key.replace("/merges/", "/begins/")
        if mark != key and mark in documents:
            found[mark] = seal_document({**documents[mark], "merge": _digest_of(body)})
    return found


def _digest_of(body: bytes) -> str:
    return body[-66:-2].decode()


def write_all(store: Path, bodies: Mapping[str, bytes]) -> None:
    """Put the documents into a store in a folder, over those that are there."""
    for key, body in bodies.items():
        (store / key).write_bytes(body)


@contextmanager
def planted(store: Path, bodies: Mapping[str, bytes]) -> Iterator[None]:
    """Put the documents into a store in a folder for the block; put back those that were there before at its end."""
    originals = {key: (store / key).read_bytes() for key in bodies}
    try:
        write_all(store, bodies)
        yield
    finally:
        write_all(store, originals)


def read_documents(store: Path) -> dict[str, Any]:
    """Every JSON document of a store, by key."""
    paths = sorted(path for path in store.rglob("*.json"))
    return {str(path.relative_to(store)): json.loads(path.read_bytes()) for path in paths}
