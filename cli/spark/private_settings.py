"""How settings reach Spark's JVM: in a file that only this user can read.

pyspark puts them on the command lines of a shell and two JVMs, which every user of the machine can read.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SUBMIT_ARGUMENTS = "PYSPARK_SUBMIT_ARGS"
JAVA_OPTIONS = ("spark.driver.extraJavaOptions", "spark.driver.defaultJavaOptions")


@contextmanager
def in_private_file(settings: Mapping[str, str], folder: Path) -> Iterator[None]:
    """Let the JVM that is launched in the block read `settings` from a file in `folder`."""
    file = folder / "spark.properties"
    lines = [f"{_escaped(name, of_name=True)}={_escaped(value)}\n" for name, value in settings.items()]
    write_private(file, "".join(lines))
    before = os.environ.get(SUBMIT_ARGUMENTS)
    # A properties file replaces the defaults of the Spark installation, unless they are asked for.
    ours = f"--properties-file {shlex.quote(str(file))} --load-spark-defaults"
    os.environ[SUBMIT_ARGUMENTS] = f"{ours} {before or 'pyspark-shell'}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SUBMIT_ARGUMENTS]
        else:
            os.environ[SUBMIT_ARGUMENTS] = before


def with_private_options(settings: Mapping[str, str], folder: Path) -> dict[str, str]:
    """`settings`, with the driver's JVM options in a file that java reads: no name tells for sure what is a secret."""
    changed = dict(settings)
    for name in JAVA_OPTIONS:
        if settings.get(name):
            file = folder / f"{name}.txt"
            words = [word.replace("\\", "\\\\").replace('"', '\\"') for word in shlex.split(settings[name])]
            write_private(file, "".join(f'"{word}"\n' for word in words))
            changed[name] = shlex.quote(f"@{file}")
    return changed


def write_private(file: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first moment on."""
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as out:
        out.write(text)


def _escaped(text: str, *, of_name: bool = False) -> str:
    """`text` as in a Java properties file. Source: the documentation of java.util.Properties."""
    for plain, escaped in (("\\", "\\\\"), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t"), ("\f", "\\f")):
        text = text.replace(plain, escaped)
    for mark in "=: #!" if of_name else "":
        text = text.replace(mark, f"\\{mark}")
    return text if of_name or not text[:1].isspace() else f"\\{text}"
