"""A training gives the same samples and the same weights on any number of ranks."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from conf.batches import build_dataset, build_sampler, open_images, open_split
from data import Batch, ShapesConfig, ensure_shapes, make_loader
from tests.runs.kill_resume import largest_difference, parts_of
from tests.runs.process_group import run_group
from tests.small_run import rows, small_run
from train import train
from train_utils.checkpoint import load_checkpoint
from train_utils.distributed import World, init_distributed_mode
from train_utils.train_state import LOSS_NAMES

SMALL = ShapesConfig(train_images=27, val_images=2, image_size=64)  # three steps of 8, and 3 that fill none
LARGE = ShapesConfig(train_images=640, val_images=13, image_size=64)
SIZES = ["train.multi_scale=[0.5,1.5]", "train.batch_size=8"]
LIMIT = 1e-9  # of relative differences in float64; in float32 the network multiplies rounding


def train_here(folder: Path, shapes: ShapesConfig, run_dir: Path, more: list[str]) -> None:
    """Run this rank's part of a training."""
    train(small_run(folder / "shapes", shapes, run_dir, "evaluate.every=1", "evaluate.confidence=0.5", *more))


TRAININGS = {
    "two passes a step": (
        SMALL, (1, 4), 3,
        [*SIZES, "model.cfg=yolov3-spp", "optim.lr=0.01", "optim.clip_norm=10", "train.micro_batch_size=4"],
    ),
    "usual options": (LARGE, (1, 2, 4), 20, ["train.batch_size=32", "evaluate.batch_size=2"]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_weights_do_not_depend_on_the_number_of_processes(name: str, tmp_path: Path) -> None:
    """Nor do the average, statistics, momentum and validation losses."""
    shapes, numbers, steps, more = TRAININGS[name]
    ensure_shapes(tmp_path / "shapes", shapes)
    parts, losses = [], []
    for processes in numbers:
        run_dir = tmp_path / f"run_{processes}"
        run_group(
            train_here, processes, tmp_path, shapes, run_dir, [*more, "train.epochs=1", "train.precision=float64"]
        )
        state = load_checkpoint(run_dir / "checkpoints" / "last.pt")
        assert state["step"] == steps
        parts.append(parts_of(state))
        losses.append([float(rows(run_dir)[-1][f"val_{name}"]) for name in LOSS_NAMES])
    assert all(tensor.dtype == torch.float64 for tensor in parts[0]["momentum"].values())
    for other in parts[1:]:
        found = {part: largest_difference(tensors, other[part]) for part, tensors in parts[0].items()}
        assert max(found.values()) <= LIMIT, found
    assert all(loss == pytest.approx(losses[0], rel=LIMIT) for loss in losses) and min(losses[0]) > 0


def micro_batches(folder: Path, world_size: int, workers: int) -> list[list[tuple[Tensor, Tensor]]]:
    """Samples of each pass of two epochs, as (picture, targets) in the order of the data set."""
    more = [*SIZES, "train.micro_batch_size=4", "train.epochs=2", "augment.colour=cpu"]
    config = small_run(folder / "shapes", SMALL, folder / "run", *more)
    alone = init_distributed_mode("cpu", 60)
    annotations = open_split(config.data, "train", alone)
    images = open_images(annotations, config.data, alone)
    epochs = []
    for rank in range(world_size):
        place = World(rank, rank, world_size, world_size, 1, torch.device("cpu"), "none")
        sampler = build_sampler(config, annotations, 32, place)
        dataset = build_dataset(config, annotations, images)
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


def test_samples_depend_neither_on_processes_nor_on_workers(tmp_path: Path) -> None:
    """Images, mosaics, colours, boxes and the size of each step are the same to the last bit."""
    ensure_shapes(tmp_path / "shapes", SMALL)
    expected = micro_batches(tmp_path, 1, 0)
    assert len({image.shape for micro_batch in expected for image, _ in micro_batch}) > 1, "only one size was drawn"
    for world_size, workers in ((2, 0), (4, 0), (2, 2)):
        found = micro_batches(tmp_path, world_size, workers)
        assert len(found) == len(expected) == 2 * 3 * 2
        for one, other in zip(expected, found, strict=True):
            # Which of a micro-batch a rank takes is free; here each has as many.
            assert len(one) == len(other) == 4
            for sample in one:
                assert any(all(map(torch.equal, sample, its_sample)) for its_sample in other)


@pytest.mark.slow
def test_patience_ends_all_processes_together(tmp_path: Path) -> None:
    """Only rank 0 has the figures; AP stays 0 at this learning rate."""
    ensure_shapes(tmp_path / "shapes", SMALL)
    still = [*SIZES, "train.epochs=6", "train.patience=1", "optim.lr=1e-9", "train.timeout_seconds=34"]
    run_group(train_here, 2, tmp_path, SMALL, tmp_path / "run", still)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["epoch"] == 2
