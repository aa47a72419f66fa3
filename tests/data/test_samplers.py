"""The order of images: the same for the whole run at any number of ranks, and each image once."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from data import DataError, MultiScale, Request, Resize, TrainBatchSampler, eval_batches
from data.geometry import scaled_size

FIXED = MultiScale(64, 1, 1, 32, 0)


def micro_batches(world_size: int, images_per_rank: int, epoch: int = 0, **more: int) -> list[Counter[Request]]:
    """What all ranks together see in each micro-batch of an epoch; 101 images, steps of 12."""
    samplers = [
        TrainBatchSampler(
            101, 12, world_size * images_per_rank, world_size, rank, seed=5, sizes=MultiScale(96, 0.5, 1.5, 32, 5)
        )
        for rank in range(world_size)
    ]
    for sampler in samplers:
        sampler.set_epoch(epoch, **more)
    shares = [list(sampler) for sampler in samplers]
    assert [len(share) for share in shares] == [len(sampler) for sampler in samplers]
    return [Counter(request for part in parts for request in part) for parts in zip(*shares, strict=True)]


def test_an_epoch_holds_no_image_twice_and_the_next_has_another_order() -> None:
    epochs = [sum(micro_batches(2, 6, epoch), Counter()) for epoch in range(2)]
    for epoch in epochs:
        assert len({request.index for request in epoch}) == 96 == epoch.total()
    assert {request.index for request in epochs[0]} != {request.index for request in epochs[1]}


def test_seeds_do_not_share_orders() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = TrainBatchSampler(40, 8, 8, 1, 0, seed, FIXED)
        sampler.set_epoch(epoch)
        return [request.index for batch in sampler for request in batch]

    assert order(0, 1) != order(1, 0) and order(0, 1) == order(0, 1)


def test_one_size_in_all_micro_batches_of_a_step() -> None:
    sizes = [{(r.height, r.width) for r in batch} for batch in micro_batches(1, 3, epoch=1)]
    assert all(len(size) == 1 for size in sizes)
    steps = [sizes[i : i + 4] for i in range(0, len(sizes), 4)]
    assert all(len(set.union(*step)) == 1 for step in steps)
    assert len(set.union(*sizes)) > 1


def test_the_first_step_of_a_training_has_the_largest_size_on_any_number_of_ranks() -> None:
    """Memory runs out at once or never; a resumed run draws what it would have drawn."""
    for world_size, images_per_rank in ((1, 3), (2, 3), (3, 4), (2, 6)):
        passes = 12 // (world_size * images_per_rank)
        drawn = [{(r.height, r.width) for r in batch} for batch in micro_batches(world_size, images_per_rank)]
        assert all(sizes == {(128, 128)} for sizes in drawn[:passes])
        assert {(128, 128)} != set().union(*drawn[passes:])
        later = micro_batches(world_size, images_per_rank, epoch=1)[0]
        assert {(r.height, r.width) for r in later} == {MultiScale(96, 0.5, 1.5, 32, 5).size(8)}


def test_multi_scale() -> None:
    sizes = MultiScale(416, 0.67, 1.5, 32, seed=1)
    drawn = [sizes.size(step) for step in range(2000)]
    assert drawn[0] == (640, 640) == max(drawn), "the largest comes first"
    assert min(drawn) == (288, 288) and all(h == w and h % 32 == 0 for h, w in drawn)
    counts = Counter(drawn[1:])
    assert len(counts) == 12 and min(counts.values()) > 110, "every multiple of the stride, evenly"
    assert drawn == [MultiScale(416, 0.67, 1.5, 32, seed=1).size(step) for step in range(2000)]
    assert drawn != [MultiScale(416, 0.67, 1.5, 32, seed=2).size(step) for step in range(2000)]
    assert FIXED.size(0) == FIXED.size(7) == (64, 64)
    with pytest.raises(DataError, match=r"train.image_size=410 .* stride 32. fix: train.image_size=384 or 416"):
        MultiScale(410, 1, 1, 32, 0)


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "world_size", "message"),
    [
        (10, None, 4, r"train.batch_size=10 is not a multiple of 4 ranks. fix: train.batch_size=8 or 12$"),
        (2, 2, 4, r"train.batch_size=2 is not a multiple of 4 ranks. fix: train.batch_size=4$"),
        (12, 8, 1, r"train.micro_batch_size=8 must divide train.batch_size=12 and .* fix: train.micro_batch_size=6$"),
        (12, 3, 2, r"be a multiple of 2 ranks. fix: train.micro_batch_size=2$"),
        (12, 1, 4, r"fix: train.micro_batch_size=4$"),
        (12, 24, 4, r"fix: train.micro_batch_size=12$"),
        (64, 64, 1, r"has 20 images, fewer than train.batch_size=64. fix: a train.batch_size of at most 20"),
    ],
)
def test_batch_sizes_that_do_not_fit(
    batch_size: int, micro_batch_size: int | None, world_size: int, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        TrainBatchSampler(20, batch_size, micro_batch_size, world_size, 0, 0, FIXED)


def test_without_a_micro_batch_size_a_pass_takes_the_whole_batch_on_any_number_of_ranks() -> None:
    samplers = [TrainBatchSampler(20, 12, None, world_size, 0, 0, FIXED) for world_size in (1, 2, 4)]
    assert [(sampler.images_per_rank, sampler.accumulate) for sampler in samplers] == [(12, 1), (6, 1), (3, 1)]


@pytest.mark.parametrize("rect", [False, True])
def test_eval_batches(rect: bool) -> None:
    sizes = np.random.default_rng(0).integers(40, 500, (53, 2)).astype(np.int32)
    inputs = {}
    for batch_size in (1, 4, 100):
        batches = eval_batches(sizes, 160, batch_size, 32, rect)
        flat = [request for batch in batches for request in batch]
        assert sorted(request.index for request in flat) == list(range(53))
        for batch in batches:
            assert len(batch) <= batch_size and len({(r.height, r.width) for r in batch}) == 1
        inputs[batch_size] = {r.index: (r.height, r.width) for r in flat}
        areas = [batch[0].height * batch[0].width for batch in batches]
        assert areas == sorted(areas, reverse=True)
        for world_size in (1, 2, 3, 4, 80):
            shares = [batches[rank::world_size] for rank in range(world_size)]
            seen = [request.index for share in shares for batch in share for request in batch]
            assert sorted(seen) == list(range(53)) and sum(len(share) for share in shares) == len(batches)
    assert inputs[1] == inputs[4] == inputs[100], "an image's shape does not depend on its batch"
    for index, shape in inputs[1].items():
        height, width = scaled_size(tuple(sizes[index].tolist()), (160, 160))
        expected = (-(-height // 32) * 32, -(-width // 32) * 32) if rect else (160, 160)
        assert shape == expected


def test_stretched_images_are_square_whatever_rect_says() -> None:
    sizes = np.random.default_rng(0).integers(40, 500, (20, 2)).astype(np.int32)
    for rect in (False, True):
        batches = eval_batches(sizes, 160, 8, 32, rect, resize=Resize.stretch)
        assert {(r.height, r.width) for batch in batches for r in batch} == {(160, 160)}
        assert [len(batch) for batch in batches] == [8, 8, 4]
