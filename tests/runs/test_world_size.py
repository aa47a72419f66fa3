"""A training gives the same weights on any number of ranks."""

from pathlib import Path

import pytest
import torch

from data import ShapesConfig
from models import zoo_cfg
from tests.runs.kill_resume import largest_difference, parts_of
from tests.runs.process_group import run_group
from tests.small_run import rows, small_run
from train import train
from train_utils.checkpoint import load_checkpoint
from train_utils.train_state import LOSS_NAMES

SHAPES = ShapesConfig(train_images=27, val_images=3, image_size=64)  # three steps of 8, and 3 that fill none
SIZES = ["train.multi_scale=[0.5,1.5]", "train.batch_size=8"]
PASSES = ["optim.clip_norm=10", "train.micro_batch_size=4", "evaluate.batch_size=2"]
ANCHORS = ["model.anchors=auto", "loss.anchor_iou=0.9"]  # more than those of the .cfg give: rank 0 fits others
LIMIT = 1e-9  # of relative differences in float64; in float32 the network multiplies rounding


def train_here(folder: Path, run_dir: Path, more: list[str]) -> None:
    train(small_run(folder / "shapes", run_dir, "evaluate.every=1", "evaluate.confidence=0.5", *more, shapes=SHAPES))


@pytest.mark.parametrize(
    ("world_size", "more"), [(2, [*SIZES, *PASSES, *ANCHORS]), pytest.param(4, [SIZES[-1]], marks=pytest.mark.release)]
)
def test_weights_do_not_depend_on_the_number_of_processes(world_size: int, more: list[str], tmp_path: Path) -> None:
    cfg = tmp_path / "dropout.cfg"
    layers = zoo_cfg("yolov3-spp").text.rpartition("[convolutional]")
    cfg.write_text("".join((layers[0], "[dropout]\nprobability=0.3\n\n", *layers[1:])))
    more = [*more, "model.cfg=" + str(cfg)] if world_size == 2 else more
    parts, losses, options = [], [], [*more, "train.epochs=1", "train.precision=float64"]
    for processes in (1, world_size):
        run = tmp_path / f"run_{processes}"
        run_group(train_here, processes, tmp_path, run, options)
        state = load_checkpoint(run / "checkpoints" / "last.pt")
        assert state["step"] == 3
        parts.append(parts_of(state))
        losses.append([float(rows(run)[-1][kind + name]) for kind in ("val_", "") for name in LOSS_NAMES])
    assert all(tensor.dtype == torch.float64 for tensor in parts[0]["momentum"].values())
    found = {part: largest_difference(tensors, parts[1][part]) for part, tensors in parts[0].items()}
    assert max(found.values()) <= LIMIT, found
    assert losses[1] == pytest.approx(losses[0], rel=LIMIT) and min(losses[0][:4]) > 0  # no DFL and L1 here


@pytest.mark.release
def test_patience_ends_all_processes_together(tmp_path: Path) -> None:
    still = [*SIZES, "train.epochs=6", "train.patience=1", "optim.lr=1e-9", "train.timeout_seconds=34"]
    run_group(train_here, 2, tmp_path, tmp_path / "run", still)
    assert load_checkpoint(tmp_path / "run" / "checkpoints" / "last.pt")["epoch"] == 2
