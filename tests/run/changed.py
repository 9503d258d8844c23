"""Print which test modules your changes can break, for `make test TESTS=changed`: `python -m tests.run.changed`.

Changes are what differs from the merge base with main, in commits and in the working tree. A test module can break if
it is changed, or if it imports what is changed, however indirectly. If it imports the command line, it is taken to
import the commands, too, whose names are the first words of texts in it: the command line imports them as they are run.
Changes of a conftest.py, or of what it imports of tests/, concern all modules of its folder. A file that is no module,
such as a page, concerns the tests that name it or its folder.

Modules that are changed themselves have all their cases: `--whole=MODULE`. The others have those of the fixed set.
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
# What every test runs under: a change of it concerns all.
EVERYWHERE = ("pyproject.toml", "requirements.lock")


def main() -> None:
    """Print the options and modules for pytest, in one line; on stderr, how many."""
    changed = list(changed_files())
    modules = sorted(concerned(changed))
    whole = [module for module in modules if module in changed]
    sys.stderr.write(f"{len(changed)} files differ from {MAIN}: they concern {len(modules)} test modules\n")
    sys.stdout.write(" ".join([*(f"--whole={module}" for module in whole), *modules]) + "\n" * bool(modules))


def changed_files() -> Iterator[str]:
    """The paths of what differs from the merge base with main; files that git ignores are none."""
    base = git("merge-base", "HEAD", MAIN).strip()
    yield from git("diff", "--name-only", base).splitlines()
    yield from git("ls-files", "--others", "--exclude-standard").splitlines()


def git(*words: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def concerned(changed: Iterable[str]) -> set[str]:
    """The paths of the test modules that the changes can break."""
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
    """The modules of the product that import any of these, however indirectly."""
    graph = grimp.build_graph("cutline", cache_dir=None)
    # Everything is below the command line, which imports commands only as they are run.
    return set().union(*(graph.find_downstream_modules(name) for name in changed if name in graph.modules))


def uses_of(tests: Mapping[str, str]) -> dict[str, set[str]]:
    """By the path of every file below tests/, those below tests/ that it imports, however indirectly."""
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
    """The file of a module below tests/, if it is one; a name in it may follow."""
    for found in (name, name.rpartition(".")[0]):
        path = found.replace(".", "/")
        yield from (one for one in (f"{path}.py", f"{path}/__init__.py") if one in tests)


def conftests_of(module: str, tests: Mapping[str, str]) -> Iterator[str]:
    """The conftest.py of every folder that the module is in."""
    for folder in Path(module).parents:
        conftest = (folder / "conftest.py").as_posix()
        if conftest in tests:
            yield conftest


@cache
def imports_of(text: str) -> frozenset[str]:
    """The modules that a file imports, and what could be one: `from a import b` may import a.b."""
    found = set()
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module), *(f"{node.module}.{alias.name}" for alias in node.names)}
    # A plugin, a program of its own, or what a test patches: the last parts may be a class and its attribute.
    for word in words_of(text):
        if re.fullmatch(r"(tests|cutline)(\.\w+)+", word):
            found |= {word, *(word.rsplit(".", parts)[0] for parts in (1, 2))}
    return frozenset(found)


@cache
def words_of(text: str) -> frozenset[str]:
    """The words of all texts in a file."""
    constants = (node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Constant))
    return frozenset(word for value in constants if isinstance(value, str) for word in value.split())


@cache
def first_words_of(text: str) -> frozenset[str]:
    """The first words of all texts in a file."""
    constants = (node.value for node in ast.walk(parsed(text)) if isinstance(node, ast.Constant))
    return frozenset(value.split(" ")[0] for value in constants if isinstance(value, str))


@cache
def parsed(text: str) -> ast.Module:
    """The file's tree."""
    return ast.parse(text)


def module_name(path: str) -> str:
    """The module of a file of the product."""
    return ".".join(("cutline", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


if __name__ == "__main__":
    main()
