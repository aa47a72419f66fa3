"""The installed package: the wheel in an environment of its own, used in another folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from conf import REPOSITORY
from conf.cli.program import PROGRAMS
from data.errors import as_started
from tests.runs.process_group import environment_of_one
from tests.test_house import all_sources

TINY = [
    "data=shapes", "data.shapes={train_images: 8, val_images: 4, image_size: 64}", "data.workers=1",
    "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.batch_size=4", "train.epochs=1",
    "logger.pictures=false",
]  # fmt: skip
FROM_PYTHON = """
import sys
path = [*sys.path]
import hydra_yolov3_spp
assert sys.path == path and not {"conf", "data", "models", "train", "predict", "plugins"} & {*sys.modules}
from hydra_yolov3_spp import Detector
print(Detector("runs/two"))
import models, models.darknet
from hydra_yolov3_spp.project.models import darknet
assert models.darknet is darknet and models.Darknet is darknet.Darknet and sys.path == path
"""
OWN = ("conf", "data", "models", "plugins", "train")
APPLICATION = """
import sys
sys.path.append(sys.argv.pop(1))
import conf, data, data.own, plugins.own
import numpy
from hydra_yolov3_spp import Detector, evaluate, train as training
run = training(sys.argv[1:])
import models, train
assert all(module.OWN for module in (conf, data, data.own, models, plugins.own, train))
assert training([f"resume={run.folder}", "train.epochs=2"]).folder == run.folder
assert Detector(ckpt=run.folder)(numpy.zeros((64, 64, 3), numpy.uint8)).boxes_xyxy.shape[1] == 4
assert "per_class" in vars(evaluate(ckpt=run.folder)) and training is not train
"""


@pytest.mark.release
def test_an_application_with_modules_of_the_same_names(tmp_path: Path) -> None:
    """It imports some of them before ours, and the others behind a training."""
    for name in OWN:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWN = True")
        (tmp_path / name / "own.py").write_text("OWN = True")
    (tmp_path / "plugins" / "__init__.py").unlink()  # a plain folder yields to any package on sys.path
    (tmp_path / "application.py").write_text(APPLICATION)
    command = [sys.executable, "application.py", str(REPOSITORY / ".ci" / "editable"), *TINY]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment_of_one())
    assert done.returncode == 0, done.stderr


def test_no_package_is_taken_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit('not the package')")
    environment = environment_of_one() | {"PYTHONPATH": str(REPOSITORY), "PYTHONSAFEPATH": ""}
    command = [sys.executable, "-m", "hydra_yolov3_spp", "--version"]
    subprocess.run(command, cwd=tmp_path, env=environment, check=True)


def test_messages_name_the_command_that_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = ["train.py", *(f"-m {entry.command}" for entry in PROGRAMS.values() if "." in entry.command[:-3])]
    words = ["train", *(command.rpartition(".")[2].replace("_", "-") for command in commands[1:])]
    for started, start, typed in (
        ("train.py", "python", commands),
        ("/home/of/hydra_yolov3_spp/__main__.py", "python -m hydra_yolov3_spp", words),
        ("/usr/bin/hydra-yolov3-spp", "hydra-yolov3-spp", words),
    ):
        monkeypatch.setattr(sys, "argv", [started])
        for command, expected in zip(commands, typed, strict=True):
            assert as_started(f"fix: python {command} out=train.py, or") == f"fix: {start} {expected} out=train.py, or"
    assert as_started("torchrun --nnodes=2 train.py") == "torchrun --nnodes=2 -m hydra_yolov3_spp train"


@pytest.fixture(scope="module")
def bin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with the wheel, which finds the other packages where this process does."""
    folder = tmp_path_factory.mktemp("environment")
    for command in (
        [*"uv build --offline --no-build-isolation -p".split(), sys.executable, "-o", str(folder)],
        [sys.executable, "-m", "venv", "--without-pip", str(folder)],
        [*"uv pip install --offline --no-deps hydra-yolov3-spp".split(), "--python", str(folder), "-f", str(folder)],
    ):
        subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True)
    site = folder / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
    installed = site / "hydra_yolov3_spp"
    there = {str(path.relative_to(installed)) for path in installed.rglob("*.py")}
    here = {str(path.relative_to(REPOSITORY)) for path in all_sources()}
    assert there == {f"project/{path}".removeprefix("project/hydra_yolov3_spp/") for path in here}
    options = [sorted((root / "conf").rglob("*.yaml")) for root in (installed / "project", REPOSITORY)]
    assert len(options[0]) == len(options[1])
    return folder / "bin"


@pytest.mark.release
def test_the_installed_package_does_what_a_clone_does(bin_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "__init__.py").write_text("raise SystemExit('a user\\'s own package')")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHONPATH", "SLURM"))}
    environment["PATH"] = f"{bin_folder}{os.pathsep}{environment['PATH']}"

    def run(*command: str, code: int = 0) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        assert done.returncode == code, done.stdout
        return done.stdout

    command = "hydra-yolov3-spp"
    trained = run(command, "train", *TINY, "data.workers=0", "devices=2", "device=cpu", "name=two")
    assert f"\n  {command} eval ckpt=runs/two/" in trained and (tmp_path / "datasets/.index").is_dir()
    by_module = ["python", "-m", "hydra_yolov3_spp"]
    assert f"{' '.join(by_module)} compare <runs>" in run(*by_module, "compare", code=2)
    assert "fix: check-data; the programs are train, eval, " in run(command, "chek-data", code=2)
    (tmp_path / "data" / "__init__.py").unlink()
    assert "runs/two" in run("python", "-c", FROM_PYTHON)
