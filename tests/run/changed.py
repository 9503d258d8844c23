"""Print which test modules your changes can break, for `make test TESTS=changed`: `python -m tests.run.changed`.

Changes are all differences from the merge base with main, in commits and in the working tree. A changed file can break
a test module if it is the module itself or if the module imports it, directly or indirectly. The command line imports a
command only when it runs, so a module that imports the command line counts as importing every command whose name is the
first word of a string in the module. Changes to a conftest.py, or to helpers in tests/ that it imports, can break all
modules of its folder. A file that is not a module, such as a page, can break the tests that name it or its folder.

Modules that were changed themselves run all their cases: `--whole=MODULE`. The others run those of the fixed set.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import grimp

from cutline.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
MAIN = "main"
# A change to one of these files can break any test.
EVERYWHERE = ("pyproject.toml", "requirements.lock")


def main() -> None:
    """Print the options and modules for pytest in one line, and their number on stderr."""
    changed = list(changed_files())
    modules = sorted(concerned(changed))
    whole = [module for module in modules if module in changed]
    sys.stderr.write(f"{len(changed)} files differ from {MAIN}: they concern {len(modules)} test modules\n")
    sys.stdout.write(" ".join([*(f"--whole={module}" for module in whole), *modules]) + "\n" * bool(modules))


def changed_files() -> Iterator[str]:
    """Yield the paths of files that differ from the merge base with main, except for ignored files."""
    base = git("merge-base", "HEAD", MAIN).strip()
    yield from git("diff", "--name-only", base).splitlines()
    yield from git("ls-files", "--others", "--exclude-standard").splitlines()


def git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def concerned(changed: Iterable[str]) -> set[str]:
    """Return the paths of the test modules that the changes can break."""
    tests = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}
    modules = {path for path in tests if Path(path).name.startswith("test_")}
    if any(path in EVERYWHERE for path in changed):
        return modules
    product = {module_name(path) for path in changed if path.endswith(".py") and not path.startswith("tests/")}
    broken = product | importers_of(product)
    changed_tests = {path for path in changed if path.startswith("tests/")}
    pages = [Path(path) for path in changed if Path(path).suffix not in (".py", "")]
    others = {part for page in pages for part in (str(page), page.name, page.parts[0])}
    used = uses_of(tests)
    found = set()
    for module in modules:
        ways = {module, *used[module]}
        words = set().union(*(words_of(tests[path]) for path in ways))
        imported = set().union(*(imports_of(tests[path]) for path in ways))
        if "cutline.cli.main" in imported:
            first = set().union(*(first_words_of(tests[path]) for path in ways))
            imported |= {COMMANDS[word].module for word in first & COMMANDS.keys()}
        fixtures = {path for conftest in conftests_of(module, tests) for path in (conftest, *used[conftest])}
        if imported & broken or (ways | fixtures) & changed_tests or words & others:
            found.add(module)
    return found


def importers_of(changed: set[str]) -> set[str]:
    """Return the modules of the product that import any of these, directly or indirectly."""
    graph = grimp.build_graph("cutline", cache_dir=None)
    # The command line is not among them because of its commands: it imports these only when they run.
    return set().union(*(graph.find_downstream_modules(name) for name in changed if name in graph.modules))


def uses_of(tests: Mapping[str, str]) -> dict[str, set[str]]:
    """Return, by the path of each file below tests/, the files below tests/ that it imports, directly or indirectly."""
    direct = {}
    for path, text in tests.items():
        names = imports_of(text)
        direct[path] = {found for name in names if name.startswith("tests") for found in paths_of(name, tests)}
    reached = {}
    for path in tests:
        seen, left = set(), [path]
        while left:
            for found in direct[left.pop()] - seen:
                seen.add(found)
                left.append(found)
        reached[path] = seen
    return reached


def paths_of(name: str, tests: Mapping[str, str]) -> Iterator[str]:
    """Yield the file of a module below tests/, if `name` is one; it may end with a name in the module."""
    for found in (name, name.rpartition(".")[0]):
        path = found.replace(".", "/")
        yield from (one for one in (f"{path}.py", f"{path}/__init__.py") if one in tests)


def conftests_of(module: str, tests: Mapping[str, str]) -> Iterator[str]:
    """Yield the conftest.py of every folder that contains the module."""
    for folder in Path(module).parents:
        conftest = (folder / "conftest.py").as_posix()
        if conftest in tests:
            yield conftest


@cache
def imports_of(text: str) -> frozenset[str]:
    """Return the modules that a file imports or may import: `from a import b` may import a.b."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    # A plugin, a program, or the target of a patch, whose last parts may be a class and its attribute.
    for word in words_of(text):
        if re.fullmatch(r"(tests|cutline)(\.\w+)+", word):
            found |= {word, *(word.rsplit(".", parts)[0] for parts in (1, 2))}
    return frozenset(found)


@cache
def words_of(text: str) -> frozenset[str]:
    """Return the words of all strings in a file."""
    constants = (node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Constant))
    return frozenset(word for value in constants if isinstance(value, str) for word in value.split())


@cache
def first_words_of(text: str) -> frozenset[str]:
    """Return the first words of all strings in a file."""
    constants = (node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Constant))
    return frozenset(value.split(" ")[0] for value in constants if isinstance(value, str))


@cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


def module_name(path: str) -> str:
    """Return the module name of a file of the product."""
    return ".".join(("cutline", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


if __name__ == "__main__":
    main()
