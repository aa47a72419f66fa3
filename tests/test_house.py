"""Who may import whom, what architecture.md says of files, and which packages are pinned."""

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

from conf import REPOSITORY

PROGRAMS = ("train", "eval", "predict", "export")
ENTRY_POINTS = (*PROGRAMS, "plugins")
FOLDERS = ("models", "data", "conf", "train_utils", "scripts", "hydra_yolov3_spp")


def imported_names(path: Path) -> Iterator[str]:
    """The names that a file imports; of a lazy package those that it offers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == (path.suffix == ".pyi"), f"{path}: relative import, or a name of another package"
            package = f"{module_name(path)}." if node.level else ""
            yield from (f"{package}{node.module}.{alias.name}" for alias in node.names)
    lazy = path.with_suffix(".pyi")
    if path.suffix == ".py" and lazy.exists():
        yield from imported_names(lazy)


def sources(part: str) -> list[Path]:
    found = sorted((REPOSITORY / part).rglob("*.py"))
    assert found, f"no source in {part}/"
    return found


def all_sources() -> list[Path]:
    below = [path for folder in FOLDERS for path in sources(folder)]
    return below + [REPOSITORY / f"{name}.py" for name in ENTRY_POINTS]


def module_name(path: Path) -> str:
    name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
    return name.removesuffix(".__init__")


MAY_IMPORT = {  # of our own packages and programs, from the bottom up
    "models": set[str](),
    "data": set[str](),
    "conf": {"models", "data"},
    "train_utils": {"models", "data", "conf"},
}
OPENED = {  # what is above, imported in a function that needs it
    "conf/cli/from_checkpoint.py": {
        "train_utils.checkpoint.peek_config",
        "train_utils.inference.open_checkpoint.read_facts",
    },
    "conf/cli/program.py": {"plugins.import_plugins"},
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(part: str) -> None:
    of_hydra = {"hydra", "omegaconf"} if part != "conf" else set[str]()
    forbidden = {*FOLDERS, *ENTRY_POINTS, *of_hydra} - {part} - MAY_IMPORT[part]
    for path in sources(part):
        opened = OPENED.get(str(path.relative_to(REPOSITORY)), set())
        wrong = [name for name in imported_names(path) if name.split(".")[0] in forbidden and name not in opened]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"


def test_nobody_imports_a_program() -> None:
    for path in all_sources():
        wrong = [name for name in imported_names(path) if name.split(".")[0] in PROGRAMS]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    return [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


def test_architecture_names_every_source_file() -> None:
    page = (REPOSITORY / "docs" / "develop" / "architecture.md").read_text()
    names = [str(path.relative_to(REPOSITORY)) for path in all_sources() if path.name != "__init__.py"]
    assert [name for name in names if f"`{name}`" not in page] == []


@pytest.mark.parametrize("part", ["models", "data"])
def test_lazy_names_lead_to_what_they_name(part: str) -> None:
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
