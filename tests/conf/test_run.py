"""Programs: light answers, ranks, several jobs, calls from Python, and how they fail."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from hydra.core.global_hydra import GlobalHydra

from conf import REPOSITORY, ConfigError
from conf.cli.command_line import for_user
from conf.cli.launch import ranks_to_start
from conf.cli.program import PROGRAMS, options_of, start
from conf.compose import compose
from conf.schema import TrainConfig
from data import DataError, ShapesConfig, ensure_shapes, io
from data.output import LOST
from data.shapes import CLASSES
from eval import evaluate
from train import train

HEAVY = ("torch", "torchvision", "matplotlib", "cv2", "pycocotools", "numpy")
CASES = {  # options and what stderr says; for None stdout has the answer
    "train": {
        "--help": None,
        "--cfg job": None,
        "--cfg job data.root=nowhere": "data.train.annotations: there is no",  # after the options
        "--cfg=job devices=two": "devices must be a number",
        "-sc query=bash": None,
        "--version": None,
        "train.epoch=3": "train.epoch=3 is not an option here.\nfix: train.epochs=3",
        "resume=nowhere": "resume=nowhere: ",
        "--config-dir nowhere data=cats": "--config-dir nowhere names no folder.",
        "--config-dir": "--config-dir names no folder.",
        "data=shapes devices=2 model.weights=a.pt hydra/launcher=joblib": "model.weights: there is no",
    },
    "eval": {
        "--help": None,
        "": "no weights are given",
        "model=yolov3 model.weights=coco": "model= names no data.\nfix: add data=<data set>",
        "detections=a data=bccd": "detections: there is no a.\nfix: a file; ",
    },
    "predict": {
        "--help": None,
        "source=a model=yolov3 model.weights=a.pt": "there is no a.pt",
        "source=a model=yolov3-tiny-3l model.weights=coco": "model.width=1.\nfix: model.weights=<file>\n",
        "model=yolov3 model.weights=coco": "source has no value.\nfix: source=<value> on",
    },
    "export": {"--help": None, "model=yolov3 model.weights=coco batch_size=0": "batch_size must be >= 1"},
    "check_data": {"--help": None, "data=voc data.root=nowhere": "there is no"},
    "anchors": {"--help": None, "out=mine/a.yaml": "out must be [<folder>/]model/<name>.yaml"},
    "get_data": {"--help": None, "coco2017 keep=true": "keep=true is not an option here"},
    "get_weights": {"--help": None, "yolo": "no published weights are called 'yolo'"},
    "convert": {"--help": None, "ckpt=nowhere out=a": "there is no checkpoint", "weights=a": "weights=a needs"},
    "compare": {
        "--help": None,
        "--config-dir conf here resamples=1 there": "resamples must be >= 10",
        "": "name a value, as in python -m scripts.compare <runs>",
    },
    "tune": {
        "--help": None,
        "-- optim.rl=1,2": "optim.rl=1 is not an option here",
        "-- data=bccd optim.lr=interval(-1,1)": "optim.lr must be > 0",
    },
}
# Starts each case as `python <program> <options>` does and prints what it wrote, its exit code and
# the modules that it imported.
STARTS = """
import contextlib, io, json, os, runpy, sys
cases, heavy = json.loads(sys.argv[1])
os.environ["COMP_LINE"] = "python train.py data=co"
outcomes = []
for command, options in cases:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = [command, *options.split()]
        try:
            if command.endswith(".py"):
                runpy.run_path(command, run_name="__main__")
            else:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
    outcomes.append([code, out.getvalue(), err.getvalue(), [name for name in heavy if name in sys.modules]])
print(json.dumps(outcomes))
"""


def test_help_completion_and_refused_options_need_no_torch() -> None:
    """One process runs all cases: nothing heavy may be imported by any of them."""
    assert CASES.keys() == PROGRAMS.keys()
    cases = [(name, options, sentence) for name, answers in CASES.items() for options, sentence in answers.items()]
    given = json.dumps([[(PROGRAMS[name].command, options) for name, options, _ in cases], HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", STARTS, given], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ours = rf"hydra-yolov3-spp [\d.]+\ntorch {re.escape(version('torch'))}\n"
    for (name, options, sentence), (code, out, err, imported) in zip(cases, json.loads(done.stdout), strict=True):
        case = f"{PROGRAMS[name].command} {options}: {out}{err}"
        assert imported == [], case
        if sentence is not None:
            assert code == 2 and err.count("error: ") == 1 and sentence in err, case
            continue
        assert code == 0 and err == "", case
        if options == "--help":
            assert "debug=false" in out and "tracebacks" in out, case
        elif options.startswith("--cfg job"):
            assert yaml.safe_load(out)["train"]["epochs"] > 0, case
        else:
            assert options == "--version" or "data=coco" in out.split(), case
            assert options != "--version" or re.match(ours, out), case


def test_pictures_are_drawn_and_counted_before_torch_is_imported(tmp_path: Path) -> None:
    shapes = "data=shapes data.shapes.train_images=4 data.shapes.val_images=2 data.shapes.image_size=64"
    options = f"{shapes} data.root={tmp_path} data.index_dir={tmp_path}"
    given = json.dumps([[("train.py", options)], ["torch"]])
    done = subprocess.run(
        [sys.executable, "-c", STARTS, given], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    ((code, out, err, imported),) = json.loads(done.stdout)
    assert code == 2 and imported == [] and out.startswith(f"drawing 4 + 2 images, once, in {tmp_path}/"), out
    assert err.endswith("has 4 images, fewer than train.batch_size=64.\nfix: train.batch_size=1\n")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM", "RANK", "WORLD", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(io, "usable_cores", lambda: set(range(6)))


def config_of(*options: str) -> Any:
    return compose("train", TrainConfig, list(options))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("", 1),
        ("devices=3 train.batch_size=12", 3),
        ("devices=auto", 4),
        ("devices=6 device=cpu train.batch_size=12", 6),
        ("devices=7 device=cpu", r"devices=7 is more than the cores .* fix: devices=6$"),
        ("devices=3 train.batch_size=8", r"batch_size=8 is not a multiple of 3 ranks\. fix: train\.batch_size=9"),
        ("devices=2 train.batch_size=8 train.micro_batch_size=3", r"fix: train\.micro_batch_size=2$"),
        ("devices=auto device=cpu", 1),
        ("devices=5", "devices=5 needs 5 GPUs"),
        *((f"devices={word}", "devices must be a number") for word in ("0", "two", "[0,1]")),
    ],
)
def test_devices_are_a_number_of_ranks(options: str, expected: int | str, four_gpus: None) -> None:
    if isinstance(expected, int):
        assert ranks_to_start(config_of(*options.split())) == expected
    else:
        with pytest.raises((ConfigError, DataError), match=expected):
            ranks_to_start(config_of(*options.split()))


def test_neither_a_rank_nor_a_job_of_a_multirun_starts_ranks(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "data=shapes", "-m", "devices=2", "train.seed=1,2"])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests go on in this process
    with pytest.raises(SystemExit, match=r"^2$"):
        start("train")
    said = capsys.readouterr().err  # once for each job
    assert said.count("error: devices=2 cannot go with -m.\nfix: start each") == 2
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert ranks_to_start(config_of("devices=2")) == 1


TINY = [
    "data=shapes", "data.shapes={train_images: 4, val_images: 2, image_size: 64}", "data.workers=0",
    "data.root=shapes", "data.index_dir=index", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64",
    "train.batch_size=4", "train.epochs=1", "device=cpu", "logger.pictures=false",
]  # fmt: skip


def state_of_the_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return [*handlers, GlobalHydra.instance().hydra, torch.get_num_threads(), torch.distributed.is_initialized()]


def test_a_training_and_its_evaluation_called_twice_in_one_process(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    before = state_of_the_process()
    run = train(TINY)
    assert run.folder is not None and run.folder.parent == tmp_path / "runs" / "shapes" and 0 <= run["AP"] <= 1
    assert (run.folder / "checkpoints" / "best.pt").is_file()
    scored = evaluate([f"ckpt={run.folder}", "device=cpu", "out=scored"])
    assert scored == run and all(scored[name] <= 1 for name in ("precision", "recall", "f1", "threshold"))
    assert [*scored.per_class] == list(CLASSES) and scored.folder == tmp_path / "scored"
    for last in ("last", Path("last")):
        with pytest.raises(ConfigError, match=r"^last is not an option: .* fix: ckpt=last$"):
            evaluate(last)
    more = train([f"resume={run.folder}", "train.epochs=2"])
    assert more.folder == run.folder and len((run.folder / "metrics.csv").read_text().splitlines()) == 3
    assert state_of_the_process() == before


@pytest.mark.parametrize(
    ("overrides", "error", "sentence"),
    [
        (["-m", "train.seed=1,2"], ConfigError, "-m is for the command line"),
        ("epochs=3 nbs=64", ConfigError, "fix: train.epochs=3 (nbs=64: leave it out"),
        ({"data": "shapes", "epochs": 3}, ConfigError, "fix: train.epochs=3"),
        (["devices=2"], ConfigError, "devices starts processes only on a command line"),
        (["data=yolo", "data.root=nowhere"], DataError, "nowhere"),
    ],
)
def test_errors_are_exceptions_with_the_sentence_of_the_command_line(
    overrides: Any, error: type[Exception], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = state_of_the_process()
    with pytest.raises(error) as refused:
        call: Any = train
        call(**overrides) if isinstance(overrides, dict) else call(overrides)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert state_of_the_process() == before and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT])
def test_a_place_without_rights_or_space_is_one_sentence_and_other_errors_are_bugs(code: int) -> None:
    for path in ([], ["x.yaml"]):
        refused = for_user(OSError(code, os.strerror(code), *path), TrainConfig)
        assert refused is not None and refused.sentence.startswith(f"{[*path, 'a file'][0]} cannot be used (")
    for error in (FileNotFoundError(errno.ENOENT, "gone", "x"), ValueError("1"), OSError("plain")):
        assert for_user(error, TrainConfig) is None
    assert for_user(FileNotFoundError("of a loader's process, without a name"), TrainConfig) is None
    of_loader = for_user(DataError("Traceback ...\ndata.errors.DataError: a.jpg is torn. fix: mend it"), TrainConfig)
    assert of_loader is not None and (of_loader.sentence, of_loader.fix) == ("a.jpg is torn", "mend it")
    killed = for_user(RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), TrainConfig)
    assert killed is not None and "(pid 7)" in killed.sentence and killed.fix.startswith("fewer data.workers")


def test_a_detector_may_be_made_in_a_process_of_any_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert options_of("predict", ["model=yolov3-tiny", "model.weights=coco", "source=x"]).out is None


def test_a_process_that_cannot_start_others_is_told_to_load_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.current_process", lambda: SimpleNamespace(daemon=True))
    with pytest.raises(ConfigError, match=r"daemonic process.* fix: data\.workers=0$"):
        options_of("train", ["data=shapes"])
    assert options_of("train", ["data=shapes", "data.workers=0"]).data.workers == 0


@pytest.fixture
def multirun(tmp_path: Path) -> list[str]:
    ensure_shapes(tmp_path / "shapes", ShapesConfig(train_images=4, val_images=2, image_size=64))
    return [sys.executable, str(REPOSITORY / "train.py"), "-m", *TINY]


@pytest.mark.release
@pytest.mark.parametrize(
    ("launcher", "rates", "trained"),
    [("joblib hydra.launcher.n_jobs=2", "0.01,-1,0.02", 2), ("submitit_local", "-1", 0)],
)
def test_jobs_have_folders_of_their_own_and_a_failure_is_the_exit_code(
    launcher: str, rates: str, trained: int, multirun: list[str], tmp_path: Path
) -> None:
    command = [*multirun, *f"hydra/launcher={launcher} optim.lr={rates}".split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and "error: optim.lr must be > 0, got -1" in done.stderr, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    lines = {run.name[20:]: len((run / "metrics.csv").open().readlines()) for run in tmp_path.glob("runs/shapes/*")}
    named = ["optim.lr-0.01", "optim.lr-0.02"][:trained]
    assert lines == dict.fromkeys(named, 2), "a job is missing, or two wrote to one folder"
    best = [line.partition(" ")[0] for line in done.stdout.splitlines() if "best AP" in line]
    assert sorted(best) == ["#0", "#2"][:trained], done.stdout


@pytest.mark.release
def test_a_signal_ends_all_jobs_with_a_checkpoint(multirun: list[str], tmp_path: Path) -> None:
    with (tmp_path / "output.txt").open("wb") as output:
        program = subprocess.Popen(
            [*multirun, "train.epochs=1000", "train.seed=0,1"], cwd=tmp_path, stdout=output, stderr=output
        )
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("runs/shapes/*/checkpoints/last.pt")) and time.monotonic() < deadline:
            time.sleep(0.05)
        program.send_signal(signal.SIGTERM)
        assert program.wait(timeout=120) == 128 + signal.SIGINT, (tmp_path / "output.txt").read_text()[-3000:]
    assert len(list(tmp_path.glob("runs/shapes/*"))) == 1, "the next job was multirun"


def test_a_current_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match=r"the current folder has been removed\. fix: cd "):
        options_of("train", ["data=shapes"])


def test_results_that_cannot_be_printed_are_an_error(monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.stdout", os.fdopen(os.open("/dev/full", os.O_WRONLY), "w"))
    with pytest.raises(SystemExit) as ended:
        start("get_weights", ["list"])
    assert ended.value.code == 2 and "stdout cannot be written (No space" in capsys.readouterr().err
    LOST.clear()
