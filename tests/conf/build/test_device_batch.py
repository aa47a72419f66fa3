"""``train.device_batch_size=auto`` and out of memory, in whole trainings on the CPU."""

from __future__ import annotations

import os
import re
import resource
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf.build import device_batch
from conf.build.network import build_model
from conf.failures import ConfigError
from conf.schema import TrainConfig
from data import ShapesConfig, ensure_shapes
from tests.runs.process_group import run_group
from tests.small_run import small_run
from train import train
from train_utils.distributed import World
from train_utils.errors import TrainError
from train_utils.memory.probe import CPU_SHARE
from train_utils.numerics import autocast_dtype
from train_utils.run.run_state import read_run

HERE = World(0, 0, 1, 1, 0, 1, torch.device("cpu"), "none", "none")
PAIR = replace(HERE, world_size=2, local_world_size=2, launcher="torchrun", backend="gloo")
SHAPES = ShapesConfig(train_images=18, val_images=5, image_size=64, seed=0)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("auto") / "shapes"
    ensure_shapes(path, SHAPES)
    return path


def options(shapes: Path, run_dir: Path, *more: str) -> TrainConfig:
    own = ("train.multi_scale=[0.5,1.5]", "train.batch_size=8", "train.device_batch_size=auto", "train.epochs=1")
    return small_run(shapes, SHAPES, run_dir, *own, *more)


def memory_for(config: TrainConfig, images: int, world: World = HERE) -> int:
    """Bytes available on a node at which exactly ``images`` fit into a pass of each rank."""
    dtype = autocast_dtype(config.train.precision.value, world.device)
    probe = device_batch._probe(config, build_model(config.model, 5)[0], world, dtype, [96])
    enough, too_much = probe.needed(images), probe.needed(images + 1)
    return int((enough + too_much) / 2 / CPU_SHARE * world.local_world_size)


def has_memory(patch: pytest.MonkeyPatch, amount: int) -> None:
    patch.setattr(device_batch, "available_memory", lambda: amount)


def test_auto_trains_as_the_number_that_it_finds(
    shapes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = options(shapes, tmp_path / "auto")
    has_memory(monkeypatch, memory_for(config, 5))  # 5 does not divide 8
    train(config)
    out = capsys.readouterr().out
    assert "auto: 4 x 96 x 96 in a pass (images x height x width; the next larger number does" in out
    assert "\ndata.workers=0, augment.colour=cpu, train.max_device_batch_size=16\n" in out
    train(options(shapes, tmp_path / "given", "train.device_batch_size=4"))
    auto, given = read_run(tmp_path / "auto")[0], read_run(tmp_path / "given")[0]
    assert auto["micro_batch"] == 4 and auto["config"]["train"]["device_batch_size"] == "auto"
    # A checkpoint tells what was, config.yaml what was asked for.
    assert auto["config"]["augment"]["colour"] == "cpu"
    assert "colour: auto\n" in (tmp_path / "auto/config.yaml").read_text()
    for part in ("model", "ema"):
        assert all(torch.equal(value, given[part][name]) for name, value in auto[part].items()), part
    assert torch.equal(auto["rng"][0], given["rng"][0])

    # A run that goes on keeps it, whatever the memory is now.
    has_memory(monkeypatch, 2**50)
    train(replace(config, run_dir=None, resume=str(tmp_path / "auto")))
    assert "train.device_batch_size=auto: 4 images, as before" in capsys.readouterr().out


def trained_by_rank(shapes: Path, run: Path, amounts: list[int]) -> None:
    """A short training of a rank with its own amount of memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_batch, "available_memory", lambda: amounts[int(os.environ["RANK"])])
        train(options(shapes, run))


@pytest.mark.slow
def test_all_processes_take_what_the_scarcest_has(shapes: Path, tmp_path: Path) -> None:
    config = options(shapes, tmp_path / "run")
    amounts = [memory_for(config, images, PAIR) for images in (4, 2)]
    run_group(trained_by_rank, 2, shapes, tmp_path / "run", amounts)
    assert read_run(tmp_path / "run")[0]["micro_batch"] == 2 * 2
    assert "auto: 2 x 96 x 96 in a pass" in (tmp_path / "run" / "train.log").read_text()


def run_out(shapes: Path, folder: Path) -> list[str]:
    """The errors of a training and of an evaluation whose address space is too small."""
    config = options(shapes, folder / "train", "train.device_batch_size=8", "train.image_size=640", "model.width=0.25")
    large = options(shapes, folder / "evaluation", "train.device_batch_size=1", "evaluate.image_size=3200")
    told = []
    for each in (replace(config, train=replace(config.train, multi_scale=[0.1, 1.0])), large):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + 400 * 2**20, hard))
        try:
            train(each)
        except TrainError as error:
            told.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    return told


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_says_what_it_ran_and_what_to_change(shapes: Path, tmp_path: Path) -> None:
    ((training, detection),) = run_group(run_out, 1, shapes, tmp_path)
    peak = r"the peak was \d+\.\d\d GiB of \d+\.\d\d GiB, and \d+\.\d\d GiB more did not fit. "
    size = r"(images x height x width): "
    assert training.startswith(f"out of memory on cpu in a training pass of 8 x 640 x 640 {size}"), "the largest first"
    assert detection.startswith("out of memory on cpu in a detection pass of "), detection
    for sentence, fix in (
        (training, r"fix: train.device_batch_size=4 \(or auto\), or a smaller train.image_size"),
        (detection, r"fix: (evaluate.batch_size=\d+, or )?a smaller evaluate.image_size"),
    ):
        assert re.search(peak + fix, sentence), sentence


@pytest.mark.parametrize("value", ["most", "0", "-2", "2.5", "true", "[4]"])
def test_values_that_are_no_batch_size(shapes: Path, tmp_path: Path, value: str) -> None:
    with pytest.raises(ConfigError, match=r"train.device_batch_size must be 1 or more, auto to find what the memory"):
        options(shapes, tmp_path, f"train.device_batch_size={value}")
