"""Programs take the commands that README.md and docs/ show; each link leads to a heading."""

import importlib.util
import json
import pkgutil
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from PIL import Image, ImageShow
from torch.distributed.run import get_args_parser

from conf import REPOSITORY
from conf.cli.command_line import override
from conf.cli.program import PROGRAMS
from conf.compose import compose, defaults, keys_of
from conf.schema import kinds_of
from data.errors import word_of
from export import export
from predict import Detector
from tests.data.sets import a_few_of
from tests.test_house import all_sources, module_name, tracked
from tests.test_predict import folder

__all__ = ["folder"]  # a fixture

PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
STARTS = ("python ", "uv run ", "uvx ", "hydra-yolov3-spp ", "torchrun ", "sbatch ")
NAMES = {program.command: name for name, program in PROGRAMS.items()}
SBATCH_OPTIONS = {"--nodes", "--gpus-per-node", "--ntasks-per-node", "--array", "--no-requeue", "--cpus-per-task"}


def commands_of(text: str) -> list[str]:
    """The lines of code blocks that start a program, without their environment."""
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.M | re.S) + re.findall(r"^ {4}(.*)$", text, re.M)
    lines = [re.sub(r"^(?:[A-Z_]+=\S+ )+", "", line.strip()) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith(STARTS)]


COMMANDS = sorted({command for page in PAGES for command in commands_of(page.read_text())})


@pytest.fixture(scope="module")
def own_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's files: the YAML of docs/start/own-data.md as it stands there, and fitted anchors."""
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
        words = words[4:] if words[2] == "--group" else words[2:]
    match words:
        case ["sbatch", *rest]:
            at = next(i for i, word in enumerate(rest) if not word.startswith("-"))
            assert {word.split("=")[0] for word in rest[:at]} <= SBATCH_OPTIONS, command
            starts = re.findall(r"^run_\w+ (\w+\.py)", (REPOSITORY / rest[at]).read_text(), re.M)
            check_options(starts[0], rest[at + 1 :], own_files)
        case ["torchrun", *rest]:
            parsed = get_args_parser().parse_args(rest)
            started = ["python", *["-m"] * parsed.module, parsed.training_script, *parsed.training_script_args]
            check(shlex.join(started), own_files)
        case ["python", "-m", "torch.distributed.run" | "torch.distributed.launch", *rest]:
            check(shlex.join(["torchrun", *rest]), own_files)
        case ["uvx", "--from", _, *rest]:
            check(shlex.join(rest), own_files)
        case ["hydra-yolov3-spp", word, *rest] | ["python", "-m", "hydra_yolov3_spp", word, *rest]:
            check_options({word_of(program): program for program in NAMES}[word], rest, own_files)
        case ["python", "-m", module, *rest]:
            assert importlib.util.find_spec(module) is not None, f"{command}: no module {module}"
            if module in NAMES:
                check_options(module, rest, own_files)
        case ["python", "-c", code, *_]:
            exec(code, {})
        case ["pytest", *rest]:
            paths = [word for word in rest if "/" in word]
            assert all((REPOSITORY / path).exists() for path in paths), command
        case ["python", program, *rest] | [program, *rest]:
            check_options(program, rest, own_files)


def check_options(program: str, options: list[str], own_files: Path) -> None:
    """Compose ``options`` as ``program`` does, up to the values of a run, which is not here."""
    assert program in NAMES, f"no program {program}"
    entry = PROGRAMS[NAMES[program]]
    at = [number for number, word in enumerate(options) if word == "--config-dir"]
    options = entry.prepared([str(own_files) if i - 1 in at else word for i, word in enumerate(options)])
    swept = {"-m", "--multirun"} & set(options)
    options = [word for word in options if word not in ("-m", "--multirun", "--help", "--version", "--cfg", "job")]
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


def test_the_commands_of_the_cluster_examples_are_taken(own_files: Path) -> None:
    job, task = (
        yaml.safe_load((REPOSITORY / "docs" / "examples" / name).read_text())
        for name in ("pytorchjob.yaml", "skypilot.yaml")
    )
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    check(shlex.join(container["command"]), own_files)
    lines = re.sub(r"\$\(.*?\)|\$\w+", "1", f"{task['setup']}\n{task['run']}".replace("\\\n", " ")).splitlines()
    commands = [line.removeprefix(".venv/bin/") for part in lines for line in part.split(" && ") if line != "uv sync"]
    assert len(commands) == 2
    for command in commands:
        check(command, own_files)


def test_ci_runs_the_tests_as_the_readme_says_it() -> None:
    (command,) = [line for line in commands_of((REPOSITORY / "README.md").read_text()) if "pytest" in line]
    assert f" {command} " in (REPOSITORY / ".ci" / "run").read_text()


@pytest.mark.parametrize("command", a_few_of(COMMANDS))
def test_each_command_is_taken(command: str, own_files: Path) -> None:
    check(command, own_files)


OF_USERS = {"data/bccd", "data/coco128", "scripts/slurm/site.sh"}  # which are not in the repository
SUFFIXES = (".csv", ".data", ".json", ".log", ".names", ".txt", ".yaml")


def test_files_and_functions_that_pages_name_exist() -> None:
    """A quoted path is the end of a path here; a dotted name is an option, or lies in a module."""
    files = [path.relative_to(REPOSITORY) for path in tracked("*")]
    paths = {f"/{path}" for file in files for path in (file, *file.parents)}
    folders = {file.parts[0] for file in files if len(file.parts) > 1}
    modules = [module_name(path) for path in all_sources()]
    options = {key for program in PROGRAMS.values() for key in kinds_of(program.schema)}
    for page in [*PAGES, REPOSITORY / "AGENTS.md"]:
        for name in re.findall(r"`([\w./-]+?)/?(?:\(.*?\)|: \w+)?`", page.read_text()):
            if re.search(r"\.(py|sbatch)$", name) or ("/" in name and name.split("/")[0] in folders):
                found = name in OF_USERS or any(path.endswith(f"/{name}") for path in paths)
                assert found, f"{page} names {name}, which is not there"
            elif re.fullmatch(r"[a-z]\w*(\.\w+)+", name) and name not in options and not name.endswith(SUFFIXES):
                first, rest = name.split(".", 1)
                places = [module for module in modules if module.split(".")[-1] == first]
                places += [f"{module}.{first.title()}" for module in places]  # of an instance
                is_ours = len(places) == 2  # else it is a variable, or the name of several modules
                found = any(leads_somewhere(f"{place}.{rest}") for place in places)
                assert found or not is_ours, f"{page} names {name}, which is not there"


def leads_somewhere(name: str) -> bool:
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture
def home(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A user's folder with a run, its pictures and a video; what their code shows there."""
    checkpoints = tmp_path / "runs" / "quickstart" / "<date_time>" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints.parent / "config.yaml").touch()
    shutil.copy(folder / "random.pt", checkpoints / "best.pt")
    (tmp_path / "datasets").mkdir()
    (tmp_path / "datasets" / "shapes").symlink_to(folder / "shapes")
    (tmp_path / "predict.py").symlink_to(REPOSITORY / "predict.py")
    picture = cv2.resize(cv2.imread(str(next((folder / "shapes").glob("*/val/*.jpg")))), (80, 64))
    for name in ("street.jpg", "aerial.jpg"):
        cv2.imwrite(str(tmp_path / name), picture)
    video = cv2.VideoWriter(str(tmp_path / "street.mp4"), cv2.VideoWriter.fourcc(*"mp4v"), 10, (80, 64))
    for _ in range(5):
        video.write(picture)
    video.release()
    shown: list[Any] = []
    monkeypatch.setattr(ImageShow, "_viewers", [SimpleNamespace(show=lambda image, **_: shown.append(image) or True)])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return shown


def test_the_code_of_the_page_on_python_runs(home: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """But for trainings and for weights that are not here. A stand-in tracks where trackers, which
    pyproject.toml cannot name, is not installed.
    """
    if importlib.util.find_spec("trackers") is None:
        numbered = SimpleNamespace(update=lambda found: setattr(found, "tracker_id", np.arange(len(found))) or found)
        monkeypatch.setitem(sys.modules, "trackers", SimpleNamespace(ByteTrackTracker=lambda: numbered))
    page = (REPOSITORY / "docs" / "use" / "python.md").read_text().partition("## Training")[0]
    names: dict[str, Any] = {"image": Image.open("street.jpg"), "array": cv2.imread("street.jpg")}
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    for block in blocks:
        exec(block, names)
    assert len(blocks) == 4 and len(home) == 1 and len(names["found"]) > 0
    assert cv2.imread("sliced.jpg").shape == (64, 80, 3)
    tracked = cv2.VideoCapture("tracked.mp4")
    assert tracked.get(cv2.CAP_PROP_FRAME_COUNT) == 5 and names["tracks"].tracker_id.min() >= 0


@pytest.mark.release
def test_the_client_of_the_page_on_export_draws_what_the_network_finds(home: list[Any]) -> None:
    run = "runs/quickstart/<date_time>"
    export([override("ckpt", run), "nms=true", "out=best.onnx"])
    page = (REPOSITORY / "docs" / "use" / "export.md").read_text()
    names: dict[str, Any] = {}
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    exec(block, names)
    expected = Detector(run, rect=False, device="cpu")("street.jpg")
    found = names["boxes"].clip(0, [80, 64, 80, 64])
    found = found[(found[:, 2:] > found[:, :2]).all(axis=1)]  # others lie in the padding
    assert len(expected) > 0 and np.allclose(found, expected.boxes_xyxy, atol=0.01)
    assert (cv2.imread("found.png") != cv2.imread("street.jpg")).any()


@pytest.mark.release
def test_the_notebook_runs_and_is_kept_without_outputs(home, capsys, monkeypatch) -> None:
    cells = json.loads((REPOSITORY / "docs" / "use" / "detector.ipynb").read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    Path("docs").mkdir()
    monkeypatch.chdir("docs")  # Jupyter starts in the notebook's folder
    names: dict[str, Any] = {}
    for cell in code:
        exec("".join(cell["source"]), names)
    said = capsys.readouterr().out
    assert len(names["result"]) > 0 and len(home) == 3 and cv2.imread("out.jpg").shape == names["result"].image.shape
    assert "square" in said and f"{len(names['result'])} objects" in said


def test_links_lead_to_pages_and_headings() -> None:
    for page in tracked("*.md"):
        for path, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", page.read_text()):
            target = page.parent / path if path else page
            assert target.exists(), f"{page} links to {path}"
            assert not anchor or anchor in anchors_of(target), f"{page}: {path} has no heading #{anchor}"


def test_the_site_has_the_pages_of_the_index_in_its_order() -> None:
    index = re.findall(r"^\| \[[^]]+\]\(([^)]+)\)", (REPOSITORY / "docs" / "README.md").read_text(), re.M)
    nav = tomllib.loads((REPOSITORY / "zensical.toml").read_text())["project"]["nav"]
    pages = [page for section in nav for part in section.values() for page in ([part] if part == "README.md" else part)]
    assert pages == ["README.md", *index]
    assert {*pages} == {str(page.relative_to(REPOSITORY / "docs")) for page in (REPOSITORY / "docs").rglob("*.md")}


def test_pages_that_the_source_names_exist() -> None:
    for path in (path for kind in ("*.py", "*.yaml", "*.toml", "*.sh", "*.md", "Makefile") for path in tracked(kind)):
        for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.md", path.read_text()):
            assert (REPOSITORY / page).exists(), f"{path} names {page}, which is not there"
