"""Without what only Linux has, the programs run as on macOS and refuse as on Windows."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from conf import REPOSITORY
from data import ShapesConfig, ensure_shapes


def run_python(text: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(text)],
        cwd=folder, env=os.environ | environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


@pytest.mark.release
def test_the_programs_run_where_only_macos_has_its_part(tmp_path: Path) -> None:
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=8, val_images=4, image_size=64))
    data = [
        "data=shapes", f"data.root={tmp_path}/shapes", "data.workers=0", "data.index_dir=index",
        "data.shapes={train_images: 8, val_images: 4, image_size: 64}",
    ]  # fmt: skip
    training = [
        *data, "data.workers=1", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.batch_size=4",
        "train.epochs=1", "device=cpu", "run_dir=run", "logger.pictures=false", "data.cache=disk",
    ]  # fmt: skip
    commands = [
        ["train.py", *training],
        ["eval.py", "ckpt=run", "device=cpu", "data.workers=0"],
        ["predict.py", "ckpt=run", f"source={tmp_path}/shapes/**/*.jpg", "device=cpu", "out=found"],
        ["scripts/check_data.py", *data, "model=yolov3-tiny", "image_size=64", "out=report", "pictures=0"],
        ["train.py", *training[:-1], "run_dir=other", "data.cache=ram"],
    ]
    program = f"""
        import runpy, sys
        sys.modules["hotcoco"] = None  # pycocotools scores without it
        for command in {commands!r}:
            sys.argv = [{str(REPOSITORY)!r} + "/" + command[0], *command[1:]]
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            except SystemExit as end:
                if end.code:
                    raise
    """
    paths = os.pathsep.join([str(REPOSITORY / "tests" / "platforms"), str(REPOSITORY)])
    done = run_python(program, tmp_path, PYTHONPATH=paths)
    errors = [line for line in done.stderr.splitlines() if line.startswith(("error:", "fix:"))]
    assert done.returncode == 2 and len(errors) == 2, done.stdout + done.stderr
    assert "data.cache=ram" in errors[0] and "/dev/shm" in errors[0] and errors[1] == "fix: data.cache=disk"
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 2, "the training did not end"
    assert (tmp_path / "found" / "detections.json").exists() and (tmp_path / "report" / "report.txt").exists()


@pytest.mark.release
def test_windows_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """An exception where a module is imported, as in a notebook; no traceback of a program."""
    modules = ["train", "eval", "predict", "export", "scripts.check_data", "scripts.get_data"]
    program = f"""
        import importlib, runpy, signal, sys
        import torch, numpy, cv2, yaml, rich  # these run on Windows
        sys.platform = "win32"
        sys.modules["resource"] = None
        del signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGCHLD, signal.pthread_sigmask
        for name in {modules!r}:
            try:
                importlib.import_module(name)
            except ImportError as error:
                print(error)
            try:
                runpy.run_module(name, run_name="__main__", alter_sys=True)
            except SystemExit as end:
                assert end.code == 2
    """
    done = run_python(program, tmp_path, PYTHONPATH=str(REPOSITORY))
    sentences, errors = done.stdout.splitlines(), done.stderr.replace("\nfix: ", " fix: ").splitlines()
    assert len(sentences) == len(modules) and len({*sentences}) == 1, done.stdout + done.stderr
    assert "Windows" in sentences[0] and "fix: " in sentences[0]
    assert errors == [f"error: {sentence}" for sentence in sentences]
