"""Programs called from Python: options and sentences of the command line, and no traces left."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.core.global_hydra import GlobalHydra

from conf.failures import ConfigError
from conf.programs import callable_from_python, options_of, override
from conf.schema import PredictConfig
from data import DataError
from eval import evaluate
from train import train

TINY = [
    "data=shapes", "data.shapes={train_images: 8, val_images: 4, image_size: 64, seed: 0}", "data.workers=0",
    "model=yolov3-tiny", "model.width=0.125", "train.image_size=64", "train.batch_size=4", "train.epochs=1",
    "train.device=cpu", "train.precision=float32", "logger.pictures=false",
]  # fmt: skip


def state_of_the_process() -> list[Any]:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    return [*handlers, GlobalHydra.instance().hydra, torch.get_num_threads(), torch.distributed.is_initialized()]


def test_a_training_and_its_evaluation_called_twice_in_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = state_of_the_process()
    run = train(TINY)
    assert run.folder is not None and run.folder.parent == tmp_path / "runs" / "shapes" and 0 <= run["AP"] <= 1
    assert (run.folder / "checkpoints" / "best.pt").is_file()
    scored = evaluate([f"ckpt={run.folder}", "device=cpu", "out=scored"])
    assert scored == run and scored.folder == tmp_path / "scored"
    more = train([f"resume={run.folder}", "extend=1"])
    assert more.folder == run.folder and len((run.folder / "metrics.csv").read_text().splitlines()) == 3
    assert state_of_the_process() == before


@pytest.mark.parametrize(
    ("overrides", "error", "said"),
    [
        (["train.epoch=3"], ConfigError, "no option train.epoch; did you mean train.epochs=3?"),
        (["data=coca"], ConfigError, "no choice data=coca; did you mean data=coco?"),
        (["train.epochs=none"], ConfigError, "train.epochs: Value 'none' of type 'str' could not be converted to Int"),
        (["train.batch_size=0"], ConfigError, "train.batch_size must be 1 or more, got 0"),
        (["--epochs", "3"], ConfigError, "--epochs is no option: options are key=value here. fix: train.epochs=3"),
        (["-m", "train.seed=1,2"], ConfigError, "-m is for the command line"),
        (["train.epochs"], ConfigError, "cannot read the option train.epochs"),
        ("train.epochs=3", ConfigError, "options are a list of key=value here, got 'train.epochs=3'"),
        ({"train.epochs": 3}, ConfigError, "options are a list of key=value here, got {'train.epochs': 3}"),
        (["train.epochs=3", 3], ConfigError, "options are a list of key=value here, got ['train.epochs=3', 3]"),
        (None, ConfigError, "options are a list of key=value here, got None"),
        (["devices=2"], ConfigError, "devices starts processes on a command line alone"),
        (["data=yolo", "data.root=nowhere"], DataError, "nowhere"),
    ],
)
def test_errors_are_exceptions_with_the_sentence_of_the_command_line(
    overrides: Any, error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = state_of_the_process()
    with pytest.raises(error) as refused:
        train(overrides)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert vars(refused.value)["_render_traceback_"]() == [f"{error.__name__}: {refused.value}"], "for IPython"
    assert state_of_the_process() == before and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("code", "error"), [(128 + signal.SIGINT, KeyboardInterrupt), (143, SystemExit)])
def test_ctrl_c_interrupts_the_caller_instead_of_ending_it(
    code: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr("conf.programs.shutdown", lambda: ended.append(True))
    with pytest.raises(error):
        callable_from_python("predict")(lambda _: sys.exit(code))(["source=a"])
    assert ended, "the process group is left"


@pytest.mark.parametrize(
    "text", ["plain", "a b", "it's", 'say "x"', "a=b,c", "[1]", "{a: 1}", "back\\", "\\'", "null", "ü", "~/x", ""]
)
def test_a_text_goes_through_hydra_unchanged(text: str) -> None:
    config = options_of("predict", [override("source", text), override("out", None)])
    assert isinstance(config, PredictConfig)
    assert (config.source, config.out) == (text, None)
    assert override("train.multi_scale", (0.5, 1)) == "train.multi_scale=[0.5,1]"
