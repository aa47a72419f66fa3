"""Stages are timed apart, whole batches only, after a warm-up."""

from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from train_utils.speed import COUNTED, STAGES, WARM_UP, measure_speed


def test_each_stage_gets_its_own_time_and_small_batches_are_left_out() -> None:
    prepared: list[int] = []

    def prepare(batch: list[int]) -> Tensor:
        prepared.append(len(batch))
        time.sleep(0.02 if len(prepared) > WARM_UP else 0.5)
        return torch.zeros(len(batch), 3, 8, 8)

    def network(images: Tensor) -> list[Tensor]:
        assert torch.is_inference_mode_enabled()
        time.sleep(0.04)
        return [images]

    batches = [[1, 2], [3, 4], [5, 6], [7, 8], [9]]
    speed = measure_speed(batches, prepare, network, lambda maps: list(maps[0]), torch.device("cpu"))
    assert (speed.batch_size, speed.batches, prepared) == (2, 4, [2] * (WARM_UP + 4))
    assert list(speed.milliseconds) == list(STAGES)
    # By half, for a busy machine: sleeping never ends early.
    assert 10 <= speed.milliseconds["preprocessing"] < 200 and speed.milliseconds["network"] >= 20
    assert speed.line().startswith("batch 2: preprocessing ") and "median of 4 batches" in speed.line()


@pytest.mark.parametrize("count", [1, COUNTED + 5])
def test_few_and_many_batches(count: int) -> None:
    prepared = []

    def prepare(batch: list[int]) -> Tensor:
        prepared.append(len(batch))
        return torch.zeros(1, 3, 2, 2)

    speed = measure_speed([[0]] * count, prepare, lambda images: [images], list, torch.device("cpu"))
    assert speed.batches == min(count, COUNTED) and len(prepared) == min(WARM_UP, count) + speed.batches
