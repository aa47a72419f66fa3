"""A training gives the same samples and the same weights on any number of ranks."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.batches import build_dataset, build_sampler, open_images, open_split
from conf.entry import compose
from conf.schema import TrainConfig
from data import Batch, ShapesConfig, ensure_shapes, make_loader
from tests.runs.kill_resume import largest_difference, parts_of
from tests.runs.process_group import run_group
from train import train
from train_utils.checkpoint import load_checkpoint
from train_utils.distributed import World, init_distributed_mode

SHAPES = {"train_images": 27, "val_images": 2, "image_size": 64}  # three steps of 8, and 3 that fill none
LIMIT = 1e-9  # of relative differences in float64; in float32 the network multiplies rounding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("world_size")
    ensure_shapes(path / "shapes", ShapesConfig(**SHAPES))
    return path


def options(folder: Path, *more: str) -> TrainConfig:
    shapes = ", ".join(f"{key}: {value}" for key, value in SHAPES.items())
    return compose(
        "train",
        TrainConfig,
        [
            "data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0",
            f"data.shapes={{{shapes}}}", "train.image_size=64", "train.multi_scale=[0.5,1.5]", "train.batch_size=8",
            "train.epochs=1", "train.device=cpu", *more,
        ],
    )  # fmt: skip


def train_here(folder: Path, run_dir: Path, more: list[str]) -> None:
    """Run this rank's part of a training."""
    common = ["optim.clip_norm=10", "evaluate.confidence=0.5", "logger.pictures=false"]
    train(options(folder, f"run_dir={run_dir}", *common, *more))


@pytest.mark.slow
def test_weights_do_not_depend_on_the_number_of_processes(folder: Path) -> None:
    """With two passes per step; compares average, statistics and momentum as well."""
    states = []
    for processes in (1, 4):
        run_dir = folder / f"run_{processes}"
        network = ["model=yolov3-spp", "model.width=0.125", "train.precision=float64", "optim.lr=0.01"]
        run_group(train_here, processes, folder, run_dir, [*network, "train.micro_batch_size=4"])
        states.append(load_checkpoint(run_dir / "checkpoints" / "last.pt"))
    assert states[0]["step"] == 3
    one, four = map(parts_of, states)
    assert all(tensor.dtype == torch.float64 for tensor in one["momentum"].values())
    found = {part: largest_difference(tensors, four[part]) for part, tensors in one.items()}
    assert max(found.values()) <= LIMIT, found


@pytest.mark.slow
def test_a_training_with_the_usual_options_does_not_depend_on_the_number_of_processes(tmp_path: Path) -> None:
    """Twenty steps; what one process puts into a forward pass, several share."""
    parts: dict[int, dict[str, dict[str, Tensor]]] = {}
    for processes in (1, 2, 4):
        run_dir = tmp_path / f"run_{processes}"
        run_group(train_as_usual, processes, tmp_path, run_dir)
        state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
        assert state["step"] == 20
        parts[processes] = parts_of(state)
    for processes in (2, 4):
        found = {part: largest_difference(tensors, parts[processes][part]) for part, tensors in parts[1].items()}
        assert max(found.values()) <= LIMIT, (processes, found)


def train_as_usual(folder: Path, run_dir: Path) -> None:
    """Run this rank's part of a training with the defaults for passes and batch norm."""
    shapes = "{train_images: 640, val_images: 2, image_size: 64}"
    small = ["data=shapes", f"data.root={folder / 'shapes'}", f"data.index_dir={folder / 'index'}", "data.workers=0"]
    small += [f"data.shapes={shapes}", "model=yolov3-tiny", "model.width=0.125", "train.image_size=64"]
    more = ["train.epochs=1", "train.batch_size=32", "train.precision=float64", "train.device=cpu"]
    train(compose("train", TrainConfig, [*small, *more, f"run_dir={run_dir}", "logger.pictures=false"]))


def micro_batches(folder: Path, world_size: int, workers: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Samples of each pass of two epochs, as (picture, targets) in the order of the data set."""
    config = options(folder, "model=yolov3-tiny", "train.micro_batch_size=4", "train.epochs=2", "augment.colour=cpu")
    config = replace(config, data=replace(config.data, workers=workers))
    annotations = open_split(config.data, "train", init_distributed_mode("cpu", 60))
    epochs = []
    for rank in range(world_size):
        place = World(rank, rank, world_size, world_size, 1, torch.device("cpu"), "none")
        sampler = build_sampler(config, annotations, 32, place)
        dataset = build_dataset(config, annotations, open_images(annotations, config.data, place))
        loader = make_loader(dataset, sampler, workers, place.device)
        batches: list[Batch] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            batches += list(loader)
        epochs.append(batches)
    return [[sample for batch in shares for sample in samples(batch)] for shares in zip(*epochs, strict=True)]


def samples(batch: Batch) -> list[tuple[Tensor, Tensor]]:
    images = batch.network_input()
    return [(images[i], batch.targets[batch.targets[:, 0] == i, 1:]) for i in range(len(images))]


def test_samples_depend_neither_on_processes_nor_on_workers(folder: Path) -> None:
    """Images, mosaics, colours, boxes and the size of each step are the same to the last bit."""
    expected = micro_batches(folder, 1, 0)
    assert len({image.shape for micro_batch in expected for image, _ in micro_batch}) > 1, "only one size was drawn"
    for world_size, workers in ((2, 0), (4, 0), (2, 2)):
        found = micro_batches(folder, world_size, workers)
        assert len(found) == len(expected) == 2 * 3 * 2
        for one, other in zip(expected, found, strict=True):
            # Which of a micro-batch a rank takes is free; here each has as many.
            assert len(one) == len(other) == 4
            for image, targets in one:
                assert any(
                    torch.equal(image, its_image) and torch.equal(targets, its_targets)
                    for its_image, its_targets in other
                )


@pytest.mark.slow
def test_patience_ends_all_processes_together(folder: Path) -> None:
    """Only rank 0 has the figures; AP stays 0 at this learning rate."""
    run_dir = folder / "patience"
    still = ["model=yolov3-tiny", "model.width=0.125", "train.epochs=6", "train.patience=1", "optim.lr=1e-9"]
    run_group(train_here, 2, folder, run_dir, [*still, "train.timeout_seconds=34", "evaluate.every=1"])
    assert load_checkpoint(run_dir / "checkpoints" / "last.pt")["epoch"] == 2
