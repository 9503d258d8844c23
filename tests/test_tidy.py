"""The style rules that no linter checks: names, who prints, what errors say. Directions of imports: pyproject.toml."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache, wraps
from importlib import import_module
from pathlib import Path

from cutline.cli.output.failure import MEANINGS
from cutline.storage.errors import SnapshotError

ROOT = Path(__file__).parent.parent
PACKAGES = ("check", "cli", "columns", "embedded", "fleet", "nodes", "restore", "snapshots", "spark", "storage", "wal")
TUPLE_VALUES_MAX = 2  # with three or more, nobody knows which is which
# The clock itself, times of local files, what runs in an executor to be compared, and the workload of the demo.
OWN_CLOCK = {
    "storage/clock.py",
    "cli/process/detaching.py",
    "spark/session_folder.py",
    "spark/class_archive.py",
    "spark/archive_daemon.py",
    "spark/examine.py",
    "embedded/bank_workload.py",
}
# Programs and processes of their own; and a warning that comes before a command has any output.
PRINTING = {
    "embedded/confine.py",
    "spark/executor.py",
    "spark/python_daemon.py",
    "spark/record_archive.py",
    "spark/session_folder.py",
    "spark/task_processes.py",
}
FORBIDDEN_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "manager", "misc"}
FORBIDDEN_ENDINGS = ("_utils", "_helpers", "_common", "_base", "_manager", "_new", "_v2")

MODULES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TEST_MODULES = sorted((ROOT / "tests").rglob("*.py"))


def in_every_module(rule: Callable[[Path], None]) -> Callable[[], None]:
    """A test of a rule in all modules; it names each that breaks it."""

    @wraps(rule)
    def test() -> None:
        broken = []
        for path in MODULES:
            try:
                rule(path)
            except AssertionError as error:
                broken.append(f"{path.relative_to(ROOT)}: {error}")
        assert not broken, "\n".join(broken)

    # Else pytest takes the rule's parameter for a fixture.
    del test.__wrapped__  # type: ignore[attr-defined]
    return test


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def name_of(path: Path) -> str:
    return ".".join(("cutline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


def called_by(node: ast.AST) -> str:
    """The function that a node calls, if it is one by its name or in a module; "" otherwise."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    inner = function.value if isinstance(function, ast.Attribute) else function
    is_short = isinstance(inner, ast.Name) or (isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name))
    return ast.unparse(function) if is_short else ""


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def annotations_of(tree: ast.Module) -> Iterator[ast.expr]:
    """The types of all parameters, results and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
            yield node.annotation
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.returns is not None:
            yield node.returns


@in_every_module
def test_annotated_tuples_have_at_most_two_values(path: Path) -> None:
    for annotation in annotations_of(tree_of(path)):
        for node in ast.walk(annotation):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "tuple":
                parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
                assert len(parts) <= TUPLE_VALUES_MAX, f"line {node.lineno}: {ast.unparse(node)}"


def test_no_two_classes_have_the_same_name() -> None:
    paths: dict[str, list[str]] = {}
    for path in MODULES:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                paths.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    assert {name: where for name, where in paths.items() if len(where) > 1} == {}


@in_every_module
def test_nothing_below_cli_prints_or_exits(path: Path) -> None:
    if path.is_relative_to(ROOT / "cli") or path.relative_to(ROOT).as_posix() in PRINTING:
        return
    for node in ast.walk(tree_of(path)):
        called = called_by(node)
        assert called not in {"print", "exit", "quit", "sys.exit", "os._exit"}, f"line {node.lineno}: {called}"
        assert called not in {"sys.stdout.write", "sys.stderr.write"}, f"line {node.lineno}: {called}"
        raised = ast.unparse(node.exc) if isinstance(node, ast.Raise) and node.exc else ""
        assert not raised.startswith("SystemExit"), f"line {node.lineno}: {raised}"


@in_every_module
def test_the_time_is_asked_in_one_place(path: Path) -> None:
    """storage/clock.py corrects it by the nodes' clocks."""
    if path.relative_to(ROOT).as_posix() in OWN_CLOCK:
        return
    for node in ast.walk(tree_of(path)):
        called = called_by(node)
        assert called not in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}, f"line {node.lineno}"


@in_every_module
def test_what_executors_get_is_sent_as_plain_bytes(path: Path) -> None:
    """pyspark's own broadcast fails with large arrays where a cluster encrypts."""
    if path.relative_to(ROOT).as_posix() == "spark/sent_values.py":
        return
    for node in ast.walk(tree_of(path)):
        called = called_by(node)
        assert not called.endswith(("sparkContext.broadcast", "context.broadcast")), f"line {node.lineno}: {called}"


@in_every_module
def test_modules_are_named_for_what_they_contain(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES
    assert not path.stem.endswith(FORBIDDEN_ENDINGS)


@in_every_module
def test_every_module_says_what_it_is_responsible_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "no docstring"


def test_a_public_method_without_a_docstring_has_that_of_a_protocol_or_a_base_class() -> None:
    classes = [node for path in MODULES for node in tree_of(path).body if isinstance(node, ast.ClassDef)]
    documented = {
        method.name
        for node in classes
        if "Protocol" in map(ast.unparse, node.bases)
        for method in node.body
        if isinstance(method, ast.FunctionDef)
    }
    bare = [
        f"{path.relative_to(ROOT)}: {node.name}.{method.name}"
        for path in MODULES
        for node in tree_of(path).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
        if not ast.get_docstring(method) and method.name not in documented
        if not is_inherited(path, node.name, method.name)
    ]
    assert bare == []


def is_inherited(path: Path, name: str, method: str) -> bool:
    kind = getattr(import_module(name_of(path)), name)
    return any(hasattr(base, method) for base in kind.__bases__)


def test_every_error_has_an_exit_code_of_the_table_and_its_own_slug() -> None:
    codes: dict[str, int] = {}
    for path in MODULES:
        __import__(name_of(path))
    for error in errors_below(SnapshotError):
        if error.__module__.partition(".")[0] != "cutline":
            continue
        assert error.exit_code in MEANINGS, f"{error.__name__} exits with {error.exit_code}"
        slug = error.slug.fget(error.__new__(error))  # type: ignore[attr-defined]
        assert slug not in codes, f"two errors have the slug {slug}"
        codes[slug] = error.exit_code
    assert codes


def errors_below(kind: type[SnapshotError]) -> Iterator[type[SnapshotError]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from errors_below(subclass)


def test_exit_codes_mean_one_thing_each() -> None:
    assert len(set(MEANINGS.values())) == len(MEANINGS)
