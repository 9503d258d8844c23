"""The style rules that a machine can check: direction of imports, names, who prints, what errors say."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path

import pytest

from cutline.cli.output.exit_codes import MEANINGS
from cutline.storage.errors import SnapshotError

ROOT = Path(__file__).parent.parent
# The folders from the bottom up. A module imports modules of its own folder and of lower floors, never of a neighbour.
FLOORS = (
    ("storage", "columns"),
    ("storage/encryption",),
    ("fleet",),
    ("fleet/nodes",),
    ("fleet/tables", "fleet/programs", "wal/slots"),
    ("fleet/read_only", "wal/segments", "embedded"),
    ("wal/cut",),
    ("wal/decoding", "snapshots/records"),
    ("snapshots/executors",),
    ("wal/drain", "snapshots/ddl", "snapshots/operations"),
    ("snapshots/activity", "snapshots/globals", "snapshots/tasks"),
    ("snapshots/base_copy", "snapshots/listing", "snapshots/removal"),
    ("snapshots/fold", "snapshots/create", "snapshots/metrics"),
    ("snapshots/restore_point", "snapshots/between_cuts"),
    ("restore/parts", "restore/routing"),
    ("restore/ddl", "restore/estimates", "restore/copies"),
    ("restore/rows", "restore/obstacles"),
    ("restore/topology", "restore/data_only", "restore/targets"),
    ("restore", "check"),
    ("restore/drill", "restore/undoing"),
    ("cli/folders",),
    ("cli/background",),
    ("cli/output", "cli/spark"),
    ("cli/views", "cli/monitoring"),
    ("cli/report",),
    ("cli/watch",),
    ("cli/commands", "cli"),
    ("cli/demo",),
)
FLOOR_OF = {folder: number for number, floor in enumerate(FLOORS) for folder in floor}
PACKAGES = tuple(sorted({folder.partition("/")[0] for folder in FLOOR_OF}))
TUPLE_VALUES_MAX = 2  # with three or more, nobody knows which is which
# The clock itself, times of local files, what runs in an executor to be compared, and the workload of the demo.
OWN_CLOCK = {
    "storage/clock.py",
    "cli/background/detaching.py",
    "cli/folders/session_folder.py",
    "cli/spark/class_archive.py",
    "snapshots/executors/archive_daemon.py",
    "snapshots/executors/examine.py",
    "embedded/bank_client.py",
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


def folder_of(path: Path) -> str:
    return path.relative_to(ROOT).parent.as_posix()


def name_of(path: Path) -> str:
    return ".".join(("cutline", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


PATH_OF = {name_of(path): path for path in MODULES}


def imported_modules(path: Path) -> Iterator[tuple[str, int]]:
    """Our own modules that a module imports anywhere, also in functions and for types, with their lines."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import hides its direction"
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in inner if name in PATH_OF] or [str(node.module)]
        else:
            continue
        yield from (
            (name, node.lineno)
            for name in names
            if name.startswith("cutline.") or name.partition(".")[0] in {*PACKAGES, "tests", "benchmarks"}
        )


def functions_of(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@in_every_module
def test_imports_go_downward_only(path: Path) -> None:
    folder = folder_of(path)
    wrong = []
    for name, line in imported_modules(path):
        other = folder_of(PATH_OF[name]) if name in PATH_OF else name
        if other != folder and FLOOR_OF.get(other, len(FLOORS)) >= FLOOR_OF.get(folder, len(FLOORS)):
            wrong.append(f"line {line} imports {name}")
    assert not wrong, "; ".join(wrong)


def test_imports_have_no_cycles() -> None:
    imports = {name: {other for other, _ in imported_modules(path)} for name, path in PATH_OF.items()}
    done: set[str] = set()

    def visit(name: str, way: tuple[str, ...]) -> None:
        assert name not in way, f"an import cycle: {' -> '.join((*way[way.index(name) :], name))}"
        if name not in done:
            for other in imports.get(name, ()):
                visit(other, (*way, name))
            done.add(name)

    for name in imports:
        visit(name, ())


def test_every_folder_has_a_floor() -> None:
    assert {folder_of(path) for path in MODULES if path.name != "__init__.py"} <= FLOOR_OF.keys()


@pytest.mark.parametrize("folder", FLOOR_OF)
def test_every_folder_says_what_it_imports(folder: str) -> None:
    text = ast.get_docstring(tree_of(ROOT / folder / "__init__.py")) or ""
    said = text.rpartition("\n\n")[2]
    modules = [path for path in MODULES if folder_of(path) == folder]
    imported = {folder_of(PATH_OF[name]).replace("/", ".") for path in modules for name, _ in imported_modules(path)}
    assert said.startswith("Imports ")
    assert set(re.findall(r"`([\w.]+)`", said)) == imported - {folder.replace("/", ".")}


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
            if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple":
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
    # The second is a program of its own.
    if path.is_relative_to(ROOT / "cli") or path == ROOT / "embedded" / "confine.py":
        return
    for node in ast.walk(tree_of(path)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
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
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        assert called not in {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow"}, f"line {node.lineno}"


@in_every_module
def test_what_executors_get_is_sent_as_plain_bytes(path: Path) -> None:
    """pyspark's own broadcast fails with large arrays where a cluster encrypts."""
    if path.relative_to(ROOT).as_posix() == "columns/python_workers.py":
        return
    for node in ast.walk(tree_of(path)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        assert not called.endswith(("sparkContext.broadcast", "context.broadcast")), f"line {node.lineno}: {called}"


@in_every_module
def test_modules_are_named_for_what_they_contain(path: Path) -> None:
    assert path.stem not in FORBIDDEN_NAMES
    assert not path.stem.endswith(FORBIDDEN_ENDINGS)


@in_every_module
def test_every_module_says_what_it_is_responsible_for(path: Path) -> None:
    assert ast.get_docstring(tree_of(path)), "no docstring"


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
