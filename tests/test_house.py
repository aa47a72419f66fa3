"""The rules of CONTRIBUTING.md, checked: who imports whom, and how long a file may grow."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parent.parent
PARTS = ("models", "data", "train_utils")
ENTRY_POINTS = ("train", "eval", "predict", "export", "plugins")
FOLDERS = (*PARTS, "conf", "scripts")
MOST_LINES, MOST_FUNCTION_LINES = 400, 110


def imported_names(path: Path) -> Iterator[str]:
    """The names that a file imports; of a package's lazy door those that it offers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == (path.suffix == ".pyi"), f"{path}: relative import, or a door to another package"
            package = f"{module_name(path)}." if node.level else ""
            yield from (f"{package}{node.module}.{alias.name}" for alias in node.names)
    door = path.with_suffix(".pyi")
    if path.suffix == ".py" and door.exists():
        yield from imported_names(door)


def sources(part: str) -> list[Path]:
    found = sorted((REPOSITORY / part).rglob("*.py"))
    assert found, f"no source in {part}/"
    return found


def all_sources() -> list[Path]:
    return [path for folder in FOLDERS for path in sources(folder)] + [
        REPOSITORY / f"{name}.py" for name in ENTRY_POINTS
    ]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return name.removesuffix(".__init__")


@pytest.mark.parametrize("part", PARTS)
def test_parts_do_not_import_one_another_nor_what_joins_them(part: str) -> None:
    forbidden = {*PARTS, *ENTRY_POINTS, "conf", "scripts", "hydra", "omegaconf"} - {part}
    for path in sources(part):
        wrong = [name for name in imported_names(path) if name.split(".")[0] in forbidden]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"


def test_files_and_functions_are_short() -> None:
    for path in all_sources():
        text = path.read_text()
        place = path.relative_to(REPOSITORY)
        assert text.count("\n") <= MOST_LINES, f"{place} has {text.count(chr(10))} lines: split it along a concept"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                length = node.end_lineno - node.lineno + 1
                assert length <= MOST_FUNCTION_LINES, f"{place}: {node.name} has {length} lines"


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    return [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


@pytest.mark.parametrize("part", ["models", "data"])
def test_doors_lead_to_what_they_name(part: str) -> None:
    """Each name can be imported, and none is hidden by a module of the same name."""
    package = importlib.import_module(part)
    for name in imported_names(REPOSITORY / part / "__init__.pyi"):
        module, _, offered = name.rpartition(".")
        assert getattr(package, offered) is getattr(importlib.import_module(module), offered), name
        assert not (REPOSITORY / part / f"{offered}.py").exists(), f"{name} hides behind a module of this name"
    assert not hasattr(package, "nothing")


def test_every_package_of_the_environment_is_pinned() -> None:
    """The direct dependencies, and what the installed ones need here in turn."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    project = settings["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values(), settings["dependency-groups"]["dev"]]
    pins = [Requirement(line) for line in (REPOSITORY / ".ci/constraints.txt").read_text().splitlines()]
    assert all(re.fullmatch("==[^*,]+", str(pin.specifier)) for pin in pins)
    pinned = {canonicalize_name(pin.name) for pin in pins if pin.marker is None or pin.marker.evaluate()}
    needed, waiting = set[str](), [Requirement(line) for lines in lists for line in lines]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in needed:
            needed.add(name)
            try:
                further = [Requirement(line) for line in requires(name) or ()]
            except PackageNotFoundError:  # an extra that is not installed
                further = []
            waiting += [one for one in further if one.marker is None or one.marker.evaluate({"extra": ""})]
    assert needed <= pinned, f"not pinned: {sorted(needed - pinned)}. fix: make pins"
