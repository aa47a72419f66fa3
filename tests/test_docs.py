"""Each command that README.md and docs/ show is one that its program takes; each link leads to a
page and its heading.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from torch.distributed.run import get_args_parser

from conf.entry import compose, defaults, keys_of
from conf.programs import PROGRAMS, prepare_arguments
from tests.test_house import tracked

REPOSITORY = Path(__file__).resolve().parent.parent
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
STARTS = ("python ", "uv run ", "torchrun ", "sbatch ")
NAMES = {program.command: name for name, program in PROGRAMS.items()}
SBATCH_OPTIONS = {"--nodes", "--gpus-per-node", "--ntasks-per-node", "--array", "--no-requeue", "--cpus-per-task"}


def commands_of(text: str) -> list[str]:
    """The lines of code blocks, indented or fenced, that start a program, without their
    environment.
    """
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S) + re.findall(r"^ {4}(.*)$", text, re.M)
    lines = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.strip()) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(STARTS)]


COMMANDS = sorted(
    {(str(page.relative_to(REPOSITORY)), command) for page in PAGES for command in commands_of(page.read_text())}
)


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a user that docs/start/own-data.md has: its YAML as it stands there, and fitted
    anchors.
    """
    folder = tmp_path_factory.mktemp("mine")
    page = (REPOSITORY / "docs" / "start" / "own-data.md").read_text()
    cats = "\n".join(
        line[4:] for line in re.findall(r"^    (?:defaults:.*\n(?:    .*\n)+)", page, re.M)[0].splitlines()
    )
    assert yaml.safe_load(cats)["name"] == "cats"
    for group, name, text in (("data", "cats", cats), ("model", "cells", "defaults: [yolov3-tiny]\n")):
        (folder / group).mkdir()
        (folder / group / f"{name}.yaml").write_text(f"{text}\n")
    return folder


def check(command: str, own_files: Path) -> None:
    """Raise or fail where ``command`` names no program, or a program that refuses its options."""
    words = shlex.split(re.sub(r"<(\w+)>", r"\1", command), comments=True)
    if words[:2] == ["uv", "run"]:
        words = words[2:]
    match words:
        case ["sbatch", *rest]:
            at = next(i for i, word in enumerate(rest) if not word.startswith("-"))
            assert {word.split("=")[0] for word in rest[:at]} <= SBATCH_OPTIONS, command
            starts = re.findall(r"^run_\w+ (\w+\.py)", (REPOSITORY / rest[at]).read_text(), re.M)
            check_options(starts[0], rest[at + 1 :], own_files)
        case ["torchrun", *rest]:
            parsed = get_args_parser().parse_args(rest)
            check_options(parsed.training_script, parsed.training_script_args, own_files)
        case ["python", "-m", "torch.distributed.run" | "torch.distributed.launch", *rest]:
            check(shlex.join(["torchrun", *rest]), own_files)
        case ["python", "-m", module, *rest]:
            assert importlib.util.find_spec(module) is not None, f"{command}: no module {module}"
            if module in NAMES:
                check_options(module, rest, own_files)
        case ["pytest", *rest]:
            paths = [word for word in rest if "/" in word]
            assert all((REPOSITORY / path).exists() for path in paths), command
        case ["python", program, *rest] | [program, *rest]:
            check_options(program, rest, own_files)


def check_options(program: str, options: list[str], own_files: Path) -> None:
    """Compose ``options`` as ``program`` does; with a checkpoint or a run, that is not here, up to
    its values.
    """
    assert program in NAMES, f"no program {program}"
    entry = PROGRAMS[NAMES[program]]
    options = prepare_arguments(options, entry)
    swept = {"-m", "--multirun"} & set(options)
    options = [word for word in options if word not in ("-m", "--multirun", "--help")]
    options = [re.sub("^hydra.searchpath=.*", f"hydra.searchpath=[file://{own_files}]", word) for word in options]
    for group, choice in (("data", "yolo"), ("experiment", "finetune")):  # in place of paths, which are on no machine
        options = [re.sub(rf"^{group}=[^,]*[/.].*", f"{group}={choice}", word) for word in options]
    if swept:  # the first of its settings
        options = [
            f"{each.key_or_group}={next(each.sweep_string_iterator())}" if each.is_sweep_override() else word
            for word, each in zip(options, OverridesParser.create().parse_overrides(options), strict=True)
        ]
    if {"ckpt", "resume"} & set(keys_of(options)):
        defaults(NAMES[program], entry.schema, options)
    else:
        compose(NAMES[program], entry.schema, options, entry.complete)


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_each_command_is_taken(page: str, command: str, own_files: Path) -> None:
    check(command, own_files)


def test_programs_and_modules_that_pages_name_exist() -> None:
    """A quoted path is the end of a file's path here."""
    files = [f"/{path.relative_to(REPOSITORY)}" for path in [*tracked("*.py"), *tracked("*.sbatch")]]
    for page in PAGES:
        for name in re.findall(r"`([\w/]+\.(?:py|sbatch))(?:: \w+)?`", page.read_text()):
            assert any(path.endswith(f"/{name}") for path in files), f"{page} names {name}, which is not there"


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_pages_and_headings() -> None:
    for page in tracked("*.md"):
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = page.parent / path if path else page
            assert target.exists(), f"{page} links to {path}"
            assert not anchor or anchor in anchors_of(target), f"{page}: {path} has no heading #{anchor}"


def test_pages_that_the_source_names_exist() -> None:
    for path in (path for kind in ("*.py", "*.yaml", "*.toml", "*.sh", "*.md", "Makefile") for path in tracked(kind)):
        for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text()):
            assert (REPOSITORY / page).exists(), f"{path} names {page}, which is not there"
