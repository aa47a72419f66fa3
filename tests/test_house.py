"""The rules of CONTRIBUTING.md, checked: imports, sizes, and words."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import tokenize
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from conf import REPOSITORY, compose, help
from conf.run import PROGRAMS

ENTRY_POINTS = ("train", "eval", "predict", "export", "plugins")
FOLDERS = ("models", "data", "conf", "train_utils", "scripts", "hydra_yolov3_spp")
LIMITS = {  # if you raise one, say why in the commit
    "lines of source": 19_480,
    "files of source": 112,
    "folders with source": 10,
    "lines of a file": 400,
    "lines of a function": 80,
    "options of train.py": 101,  # as the page of options counts
    "lines of tests": 19_170,
    "pages of docs": 25,
    "words of docs": 17_720,  # without results and the page of options
    "words of the notebook": 5_000,
}


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


MAY_IMPORT = {  # of our own packages and programs, from the bottom up
    "models": set[str](),
    "data": set[str](),
    "conf": {"models", "data"},
    "train_utils": {"models", "data", "conf"},
}


@pytest.mark.parametrize("part", MAY_IMPORT)
def test_packages_import_only_what_lies_below_them(part: str) -> None:
    of_hydra = {"hydra", "omegaconf"} if part != "conf" else set[str]()
    forbidden = {*FOLDERS, *ENTRY_POINTS, *of_hydra} - {part} - MAY_IMPORT[part]
    for path in sources(part):
        wrong = [name for name in imported_names(path) if name.split(".")[0] in forbidden]
        assert not wrong, f"{path.relative_to(REPOSITORY)} imports {wrong}"


def tracked(pattern: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", pattern], cwd=REPOSITORY, capture_output=True, text=True
    )
    if listed.returncode != 0:
        pytest.skip("no git checkout")
    return [REPOSITORY / name for name in listed.stdout.splitlines() if (REPOSITORY / name).exists()]


@cache
def sizes() -> dict[str, tuple[int, str]]:
    """The value of each of LIMITS, and what has it where that is one of many."""
    python, pages = tracked("*.py"), tracked("docs/*.md")
    lines = {str(path.relative_to(REPOSITORY)): path.read_text().count("\n") for path in python}
    source = {name: count for name, count in lines.items() if not name.startswith("tests/")}
    functions = [
        ((node.end_lineno or 0) - node.lineno + 1, f"{node.name} of {name}")
        for name in source
        for node in ast.walk(ast.parse((REPOSITORY / name).read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    words = {str(page.relative_to(REPOSITORY / "docs")): len(page.read_text().split()) for page in pages}
    train = PROGRAMS["train"].schema
    options = [option for _, some in help.sections(train, compose.defaults("train", train)) for option in some]
    return {
        "lines of source": (sum(source.values()), ""),
        "files of source": (len(source), ""),
        "folders with source": (len({name.rpartition("/")[0] for name in source}), ""),
        "lines of a file": max((count, name) for name, count in source.items()),
        "lines of a function": max(functions),
        "options of train.py": (len(options), ""),
        "lines of tests": (sum(lines.values()) - sum(source.values()), ""),
        "pages of docs": (len(pages), ""),
        "words of docs": (sum(n for name, n in words.items() if not re.match(r"results/|train/options\.md", name)), ""),
        "words of the notebook": (words["results/notebook.md"], ""),
    }


@pytest.mark.parametrize("what", LIMITS)
def test_the_house_does_not_grow(what: str) -> None:
    value, which = sizes()[what]
    assert value <= LIMITS[what], f"{what}: {value} {which}. fix: delete as much as you add"


def test_architecture_names_every_source_file() -> None:
    page = (REPOSITORY / "docs" / "develop" / "architecture.md").read_text()
    names = [str(path.relative_to(REPOSITORY)) for path in all_sources() if path.name != "__init__.py"]
    assert [name for name in names if f"`{name}`" not in page] == []


def test_words_of_pytorch_are_where_architecture_says() -> None:
    page = (REPOSITORY / "docs" / "develop" / "architecture.md").read_text()
    rows = re.findall(r"^\| (`.+) \| (`.+) \|$", page.partition("## PyTorch")[2].partition("\n## ")[0], re.M)
    assert len(rows) > 5
    for words, files in rows:
        paths = [REPOSITORY / name for name in re.findall(r"`([^`]+)`", files)]
        text = "".join(path.read_text() for path in paths if path.is_file())
        missing = [word for word in re.findall(r"`([^`]+)`", words) if not re.search(rf"\b{re.escape(word)}\b", text)]
        assert not missing, f"{files} do not contain {missing}"


BANNED = {  # phrases that a native speaker does not write, and what to write instead
    r"\b(?!there\b)\w+\W+(?:is|are|was|were)\s+no\s+"
    r"(?!longer|more|less|larger|greater|smaller|fewer|better|worse|faster|slower|lower|higher)\w+": "is not a ...",
    r"\bof before\b": "earlier",
    r"\b(?:has|have) not (?:\d|an? )": "lacks",
    r"\bothers than\b": "other than",
    r"\bnobody's news\b": "not worth a line",
    r"\bmend(?:s|ed)?\b": "repair, recover",
    r"\bshall\b": "should, must",
    r"\bburn[-_ ]in": "warm-up",
}
BANNED_NAMES = r"(?:.*_)?(?:figures?|burn_in|why_over)(?:_.*)?|MANY"  # of variables, functions, classes
MAY_SAY = {  # what a rule does not ban there
    "burn_in": ("conf/names.yaml", "docs/coming-from.md"),  # Darknet's key
    "figure": ("train_utils/plots.py", "tests/train_utils/test_plots.py"),  # matplotlib's
}


def may_say(path: Path, said: str) -> bool:
    place = str(path.relative_to(REPOSITORY))
    return any(word in said.lower() and place in places for word, places in MAY_SAY.items())


def test_the_english_is_native() -> None:
    found = list[str]()
    for path in (path for kind in ("*.py", "*.md", "*.yaml", "*.sh") for path in tracked(kind)):
        if path == Path(__file__).resolve():
            continue
        place, text = path.relative_to(REPOSITORY), path.read_text()
        for pattern, better in BANNED.items():
            for match in re.finditer(pattern, text, re.I):
                if not may_say(path, match[0]):
                    at = text.count("\n", 0, match.end()) + 1
                    found.append(f"{place}:{at}: {' '.join(match[0].split())!r}, better {better!r}")
        if path.suffix == ".py":
            with path.open("rb") as file:
                names = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.NAME]
            wrong = {(one.start[0], one.string) for one in names if re.fullmatch(BANNED_NAMES, one.string)}
            found += [f"{place}:{at}: the name {name}" for at, name in sorted(wrong) if not may_say(path, name)]
    assert not found, "\n".join(found)


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
