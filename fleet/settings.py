"""Settings that are handed on, [spark] and [store_options] of fleet.toml, and which of them are secrets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from cutline.storage.errors import remember_secret

# Spark's default of spark.redaction.regex, which hides settings whose name or value matches, and what else is common.
SECRETIVE = re.compile(
    r"(?i)secret|passw(or)?d|passphrase|token|credential|(access|account|api)[._-]?key|(key|trust)?store[._-]?pass"
    r"|connection[._-]?string"
)
# A secret can begin as a path does, so the name has to say that there is one.
NAMES_A_FILE = re.compile(r"(?i)(file|path|dir|directory|location|store)$")
PATH = re.compile(r"(file:)?/")
JAVA_OPTIONS = "JavaOptions"


def flatten(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a table and of those in it, by names with dots."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def spark_settings(table: Mapping[str, Any]) -> dict[str, str]:
    """The settings of [spark] under their full names, as the texts that Spark takes."""
    return {
        name if name.startswith("spark.") else f"spark.{name}": _text_of(value)
        for name, value in flatten(table).items()
    }


def remember_secret_settings(settings: Mapping[str, object]) -> None:
    """Let no error show the settings that are secrets by their names, and those in the options of JVMs."""
    for name, value in settings.items():
        if isinstance(value, str) and name.endswith(JAVA_OPTIONS):
            for secret in secrets_in_options(value):
                remember_secret(secret)
        elif isinstance(value, str) and _is_secret(name, value):
            remember_secret(value)


def secrets_in_options(options: str) -> Iterator[str]:
    """Yield the values in a JVM's options that are secrets by their names: `abc` of `-Dx.password=abc`."""
    try:
        words = shlex.split(options)
    except ValueError:
        words = [options]
    for word in words:
        for equals in re.finditer("=", word):
            name, value = word[: equals.start()], word[equals.end() :]
            if SECRETIVE.search(name):
                if _is_secret(name, value):
                    yield value
                break


def _text_of(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRETIVE.search(name)) and not (NAMES_A_FILE.search(name) and PATH.match(value))
