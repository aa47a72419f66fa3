"""The two loops on a small network: accumulation, the weight of each image, threads, and losses that break."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.train_utils.test_optim import CONFIG
from train_utils.distributed import World, init_distributed_mode
from train_utils.engine import detect, train_one_epoch
from train_utils.errors import TrainError
from train_utils.log import Progress
from train_utils.optim import Schedule, WeightAverage, make_optimizer, make_scheduler


@dataclass
class Batch:
    images: Tensor
    targets: Tensor
    indices: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self


class Parts(NamedTuple):
    total: Tensor
    box: Tensor
    objectness: Tensor
    classification: Tensor


def mean_loss(raw_maps: Tensor, targets: Tensor, **_: Any) -> Parts:
    """A mean over the images, as the detection loss is one over the micro-batch."""
    value = raw_maps.square().mean()
    return Parts(value, value.detach(), value.detach(), value.detach())


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


def batches(size: int, count: int) -> list[Batch]:
    images = torch.randint(0, 256, (count, 3, 16, 16), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    return [
        Batch(images[start : start + size], torch.zeros(0, 6), torch.arange(start, start + size))
        for start in range(0, count, size)
    ]


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.LeakyReLU(0.1), nn.Conv2d(8, 4, 3))


def trained(world: World, size: int, accumulate: int, loss: Any = mean_loss, clip: float | None = None) -> nn.Module:
    model = network()
    config = replace(CONFIG, clip_norm=clip, lr=0.1)
    schedule = Schedule(config, steps_per_epoch=3, total_steps=6)
    optimizer = make_optimizer(model, config)
    result = train_one_epoch(
        model=model,
        loss=loss,
        loader=batches(size, 24),
        optimizer=optimizer,
        scheduler=make_scheduler(optimizer, schedule),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
        average=WeightAverage(model, schedule),
        schedule=schedule,
        world=world,
        accumulate=accumulate,
        step=0,
        autocast_dtype=None,
        to_input=lambda batch: batch.images.float().div_(255),
        progress=Progress(24 // size, "train", enabled=False),
    )
    assert result.step == 24 // size // accumulate
    return model


@pytest.mark.parametrize("clip", [None, 0.01])
def test_accumulation_makes_the_update_of_the_whole_batch(world: World, clip: float | None) -> None:
    whole, parts = trained(world, 8, 1, clip=clip), trained(world, 2, 4, clip=clip)
    start = network()
    for one, other, before in zip(whole.parameters(), parts.parameters(), start.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        assert not torch.equal(one, before), "nothing was learnt"


def test_a_loss_that_is_not_finite_stops_with_its_step_and_what_helps(world: World) -> None:
    def broken(raw_maps: Tensor, targets: Tensor, **_: Any) -> Parts:
        return mean_loss(raw_maps * float("nan"), targets)

    with pytest.raises(TrainError, match=r"no longer finite at step .*optim\.lr"):
        trained(world, 8, 1, broken)


def test_detections_do_not_depend_on_the_number_of_threads(world: World) -> None:
    """Convolutions split over threads add in another order; here each is computed by one thread."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.Conv2d(64, 5, 3, padding=1))

    def postprocess(raw_maps: Tensor) -> list[Tensor]:
        return [torch.cat((image.flatten(1).T[:9], torch.zeros(9, 1)), dim=1) for image in raw_maps]

    def found(threads: int) -> np.ndarray:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            progress = Progress(24, "evaluate", enabled=False)
            result = detect(model, batches(4, 24), postprocess, lambda _, __, boxes: boxes, world.device, progress)
            assert torch.get_num_threads() == threads, "the setting was not put back"
            return result
        finally:
            torch.set_num_threads(before)

    one, two = found(1), found(2)
    assert len(one) == 24 * 9 and one["image_id"].tolist() == np.repeat(np.arange(24), 9).tolist()
    assert one.tobytes() == two.tobytes()
    assert model.training, "training mode was not put back"


def test_no_images_give_no_detections(world: World) -> None:
    def nothing() -> Iterator[Batch]:
        return iter(())

    found = detect(network(), nothing(), lambda maps: [], lambda _, __, b: b, world.device, Progress(0, "", False))
    assert len(found) == 0
