"""The order of images is one for the whole run: ranks, workers and a resume do not change it."""

import math
import tracemalloc
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from data import DataError, MultiScale, Request, Resize, eval_batches, repeat_factors
from data.geometry import scaled_size
from data.plan import draw_plan
from data.samplers import TrainBatchSampler, TrainSampler, permuted
from tests.data.conftest import FIXED, NO_AUGMENT, CocoSet, sampler_of

SCALED = MultiScale(96, 0.5, 1.5, 32, 5)
BATCH = 12
SIDES = np.random.default_rng(0).integers(40, 400, (101, 2)).astype(np.int32)
FACTORS = np.random.default_rng(1).uniform(1, 3, 101)
CHOICES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rect": {"image_sizes": SIDES},
    "repeat": {"factors": FACTORS},
    "pool": {"tile_pool": 6},
    "pool of a large block": {"tile_pool": 24},
    "all": {"image_sizes": SIDES, "factors": FACTORS, "tile_pool": 4},
}


def shares_of(world_size: int, images_per_rank: int, epoch: int, start_step: int = 0, **more: Any) -> list[Any]:
    shares = []
    of_run = {"micro_batch_size": world_size * images_per_rank, "num_replicas": world_size, "seed": 5, **more}
    for rank in range(world_size):
        sampler = sampler_of(101, BATCH, SCALED, rank=rank, **of_run)
        sampler.sampler.set_epoch(epoch, start_step)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) and len(sampler.sampler) == len(sampler) * images_per_rank
    return shares


def steps_of(world_size: int, images_per_rank: int, epoch: int, **more: Any) -> list[Counter[Request]]:
    micro_batches = zip(*shares_of(world_size, images_per_rank, epoch, **more), strict=True)
    seen = [Counter(request for part in parts for request in part) for parts in micro_batches]
    count = BATCH // (world_size * images_per_rank)
    return [sum(seen[i : i + count], Counter()) for i in range(0, len(seen), count)]


@pytest.mark.parametrize("more", CHOICES.values(), ids=CHOICES.keys())
def test_steps_are_the_same_at_any_world_size_and_accumulation_and_after_a_resume(more: dict[str, Any]) -> None:
    for epoch in (0, 3):
        expected = steps_of(1, BATCH, epoch, **more)
        for world_size, images_per_rank in ((1, 3), (2, 6), (2, 3), (3, 4), (4, 3), (6, 1)):
            assert steps_of(world_size, images_per_rank, epoch, **more) == expected
    assert shares_of(2, 3, 1, start_step=5, **more) == [share[10:] for share in shares_of(2, 3, 1, **more)]


def test_an_epoch_holds_no_image_twice_and_epochs_and_seeds_differ(monkeypatch) -> None:
    epochs = [sum(steps_of(1, BATCH, epoch), Counter()) for epoch in range(2)]
    images = [{request.index for request in epoch} for epoch in epochs]
    assert [len(indices) for indices in images] == [96, 96] == [epoch.total() for epoch in epochs]
    assert images[0] != images[1]

    def requests(seed: int, epoch: int, **more: Any) -> list[Request]:
        sampler = sampler_of(40, 8, seed=seed, **more)
        sampler.sampler.set_epoch(epoch)
        return [request for batch in sampler for request in batch]

    orders, partners, shapes, repeats = (set[tuple[Any, ...]]() for _ in range(4))
    for seed, epoch in ((0, 0), (0, 1), (1, 0), (1, 1)):
        order = [request.index for request in requests(seed, epoch)]
        orders.add(tuple(order))
        partners.add(tuple(order.index(image) for request in requests(seed, epoch) for image in request.pool))
        rectangular = sampler_of(40, 8, seed=seed, image_sizes=SIDES[:40]).sampler
        rectangular.set_epoch(epoch)
        shapes.add(tuple(np.argsort(rectangular.rectangles[:, 0] / rectangular.rectangles[:, 1])))
        repeats.add(tuple(request.repeat for request in requests(seed, epoch, factors=np.full(40, 1.5))))
    assert [len(orders), len(partners), len(shapes), len(repeats)] == [4, 4, 4, 4]
    monkeypatch.setattr("data.samplers.TABLE_IMAGES", 10)  # the order is computed then
    computed = {tuple(request.index for request in requests(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(computed | orders) == 8


@pytest.mark.parametrize("count", [1, 2, 3, 64, 97, 4097, 100_003])
def test_a_computed_order_holds_each_image_once(count: int) -> None:
    orders = [permuted(np.arange(count), count, (3, epoch)) for epoch in range(2)]
    assert all(sorted(order.tolist()) == list(range(count)) for order in orders)
    assert np.array_equal(permuted(np.array([count - 1, 0]), count, (3, 1)), orders[1][[-1, 0]])
    assert count < 64 or (orders[0] == orders[1]).mean() < 0.1


def test_an_epoch_of_a_hundred_million_images_takes_no_memory() -> None:
    size, first = MultiScale(64, 1, 1, 32, 0), list[Any]()
    tracemalloc.start()
    for world_size in (1, 2, 4):
        batches = [
            TrainBatchSampler(
                TrainSampler(10**8, size, batch_size=64, num_replicas=world_size, rank=rank, seed=0, tile_pool=4)
            )
            for rank in range(world_size)
        ]
        for sampler in batches:
            sampler.sampler.set_epoch(7, start_step=1_000_000)
        first.append(Counter(request for sampler in batches for request in next(iter(sampler))))
    batches[0].sampler.set_epoch(8, start_step=1_000_000)
    assert not set(next(iter(batches[0]))) & {replace(request, epoch=8) for request in first[0]}
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert first[0] == first[1] == first[2] and len(first[0]) == 64


def test_a_step_has_one_size_and_the_first_of_a_training_has_the_largest() -> None:
    sizes = [{(request.height, request.width) for request in step} for step in steps_of(2, 3, 0)]
    assert all(len(size) == 1 for size in sizes) and sizes[0] == {(128, 128)} != set.union(*sizes)
    later = steps_of(2, 3, 1)[0]
    assert {request.height for request in later} == {SCALED.size(8)}


def test_a_rectangle_keeps_its_shape_at_each_scale() -> None:
    sizes = MultiScale([64, 96], 1, 2, 16, 5)
    shapes = [(request.height, request.width) for batch in sampler_of(40, 2, sizes) for request in batch]
    assert set(shapes) <= {(math.ceil(width / 24) * 16, width) for width in range(96, 193, 16)} and len(set(shapes)) > 3
    assert shapes[0] == (128, 192)


def test_multi_scale() -> None:
    sizes = MultiScale(416, 0.67, 1.5, 32, seed=1)
    drawn = [sizes.size(step) for step in range(2000)]
    assert drawn[0] == 640 == max(drawn) and min(drawn) == 288
    counts = Counter(drawn[1:])
    assert set(counts) == set(range(288, 641, 32)) and min(counts.values()) > 110, "evenly"
    assert drawn == [MultiScale(416, 0.67, 1.5, 32, seed=1).size(step) for step in range(2000)]
    assert drawn != [MultiScale(416, 0.67, 1.5, 32, seed=2).size(step) for step in range(2000)]
    assert FIXED.size(0) == FIXED.size(7) == 64
    with pytest.raises(DataError, match=r"train.image_size=410 .* stride 32. fix: train.image_size=416"):
        MultiScale(410, 1, 1, 32, 0)


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "world_size", "message"),
    [
        (10, None, 4, r"train.batch_size=10 is not a multiple of 4 ranks. fix: train.batch_size=12$"),
        (12, 8, 1, r"train.micro_batch_size=8 must divide train.batch_size=12 and .* fix: train.micro_batch_size=6$"),
        (12, 3, 2, r"be a multiple of the ranks \(2\). fix: train.micro_batch_size=2$"),
        (12, 24, 4, r"fix: train.micro_batch_size=12$"),
        (64, 64, 1, r"has 20 images, fewer than train.batch_size=64. fix: train.batch_size=4$"),
        (21, 21, 21, r"fewer than the 21 ranks. fix: devices=1 train.batch_size=1$"),
    ],
)
def test_batch_sizes_that_do_not_fit(batch_size, micro_batch_size, world_size, message) -> None:
    with pytest.raises(DataError, match=message):
        sampler_of(20, batch_size, micro_batch_size=micro_batch_size, num_replicas=world_size)


def test_without_a_micro_batch_size_a_pass_takes_the_whole_batch_on_any_number_of_ranks() -> None:
    samplers = [sampler_of(12, 12, num_replicas=world_size) for world_size in (1, 2, 4)]
    assert [(sampler.images_per_rank, sampler.accumulate) for sampler in samplers] == [(12, 1), (6, 1), (3, 1)]
    assert [sampler.batch_bytes for sampler in samplers] == [images * 3 * 64 * 64 for images in (12, 6, 3)]


def test_all_ranks_have_one_rectangle_in_a_step_that_holds_its_images_tightly() -> None:
    wasted = 0.0
    for epoch in (0, 2):
        for step, requests in enumerate(steps_of(2, 3, epoch, image_sizes=SIDES)):
            square = SCALED.size(epoch * 8 + step)
            ((height, width),) = {(request.height, request.width) for request in requests}
            sides = SIDES[[request.index for request in requests]]
            scaled = square * sides / sides.max(axis=1)[:, None]
            # Every image fits at the scale of the square, and the rectangle is no larger than that
            # takes.
            needed = tuple(math.ceil(side / 32 - 1e-6) * 32 for side in scaled.max(axis=0))
            if (epoch, step) == (0, 0):  # the largest of the whole run
                assert needed[0] <= height <= square and needed[1] <= width <= square
            else:
                assert (height, width) == needed
            wasted += height * width / square**2 / 16
    assert wasted < 0.9  # of the squares' pixels


@pytest.mark.parametrize("aspects", [(0.4, 2.5), (0.9, 1.1), (1.0, 1.0)])
@pytest.mark.parametrize(("num_images", "batch_size"), [(31, 4), (31, 8), (30, 16), (30, 1)])
@pytest.mark.parametrize("repeated", [False, True])
def test_memory_runs_out_in_the_first_step_or_never(aspects, num_images, batch_size, repeated) -> None:
    for seed in range(2):
        generator = np.random.default_rng(seed)
        widths = 300 * generator.uniform(*aspects, num_images)
        sides = np.stack([np.full(num_images, 300), widths], axis=1).round().astype(np.int32)
        factors = generator.uniform(1, 3, num_images) if repeated else None
        sizes = MultiScale(256, 0.8, 1, 8, seed)
        sampler = sampler_of(num_images, batch_size, sizes, seed=seed, image_sizes=sides, factors=factors)
        areas = []
        for epoch in range(20):
            sampler.sampler.set_epoch(epoch)
            areas += [batch[0].height * batch[0].width for batch in sampler]
        assert areas[0] >= max(areas)
        if batch_size < num_images // 2:  # else hardly an epoch has the worst company
            assert areas[0] <= 1.15 * max(areas), "memory is asked for that no step needs"


def test_shape_groups_come_shuffled_and_meet_others_in_another_epoch() -> None:
    aspects, companies = [], []
    for epoch in (1, 2):
        steps = steps_of(1, BATCH, epoch, image_sizes=SIDES)
        wide_to_tall = [np.divide(*SIDES[[request.index for request in step]].T).mean() for step in steps]
        aspects.append(np.argsort(wide_to_tall).tolist())
        companies.append({frozenset(request.index for request in step) for step in steps})
    assert aspects[0] != sorted(aspects[0]) and aspects[0] != aspects[1]
    assert not companies[0] & companies[1]


def test_repeat_factors_follow_the_formula(empty_set: CocoSet) -> None:
    """dog (id 1) on 8 of 10 images, cat (id 3) on 2, bird (id 7) and a crowd of birds on one."""
    image = np.zeros((64, 64, 3), dtype=np.uint8)
    box = [5.0, 5.0, 20.0, 20.0]
    for number in range(10):
        empty_set.add_image(image, [(1 if number < 8 else 3, box), *([(7, box)] if number == 0 else [])])
    empty_set.json["annotations"].append(
        {"id": 999, "image_id": 15, "category_id": 7, "bbox": box, "area": 400, "iscrowd": 1}
    )
    factors = repeat_factors(empty_set.open(), 0.4)
    assert factors.tolist() == pytest.approx([math.sqrt(0.4 / 0.1), *[1] * 7, *[math.sqrt(0.4 / 0.2)] * 2])


def test_images_come_as_often_as_their_factors_say() -> None:
    counts = np.zeros(101)
    repeats: Counter[int] = Counter()
    for epoch in range(50):
        requests = [request for step in steps_of(1, BATCH, epoch, factors=FACTORS) for request in step.elements()]
        assert len(set(requests)) == len(requests)  # the same image comes as another sample
        counts += np.bincount([request.index for request in requests], minlength=101)
        repeats.update(request.repeat for request in requests)
    expected = FACTORS * (len(requests) * 50) / FACTORS.sum()
    np.testing.assert_allclose(counts, expected, rtol=0.25)  # four deviations of drawn fractions
    assert set(repeats) == {0, 1, 2}


def test_mosaic_and_mixup_show_images_as_often_as_their_factors_say() -> None:
    factors = np.where(np.arange(400) % 100 == 7, 4.0, 1.0)
    augment = replace(NO_AUGMENT, mosaic=1, mixup=1)
    sizes, shown = np.full((400, 2), 64, dtype=np.int32), np.zeros(400)
    sampler = sampler_of(400, 8, factors=factors)
    for epoch in range(12):
        sampler.sampler.set_epoch(epoch)
        for request in (request for batch in sampler for request in batch):
            for picture in draw_plan(request, sizes, augment, 0).pictures:
                np.add.at(shown, [placed.position for placed in picture.placed], 1)
    rare = factors == 4
    assert 3.7 < shown[rare].mean() / shown[~rare].mean() < 4.3  # four deviations


def test_a_pool_is_on_one_rank_and_brings_no_other_images() -> None:
    for share in shares_of(2, 6, 1, tile_pool=6):
        for batch in share:
            images = {request.index for request in batch}
            assert all(set(request.pool) == images for request in batch)


def test_the_last_pool_is_as_large_as_all() -> None:
    """Though 36 does not divide the epoch's 101 positions."""
    for batch in shares_of(1, BATCH, 1, tile_pool=36)[0]:
        assert all(len(set(request.pool)) == 36 and request.index in request.pool for request in batch)


@pytest.mark.parametrize("resize", list(Resize))
@pytest.mark.parametrize("rect", [False, True])
def test_eval_batches_hold_each_image_once_in_a_shape_that_does_not_depend_on_its_batch(rect, resize) -> None:
    sizes = np.random.default_rng(0).integers(40, 500, (53, 2)).astype(np.int32)
    for batch_size in (1, 4, 100):
        batches = eval_batches(sizes, 160, batch_size, stride=32, rect=rect, resize=resize)
        assert sorted(request.index for batch in batches for request in batch) == list(range(53))
        areas = [batch[0].height * batch[0].width for batch in batches]
        assert areas == sorted(areas, reverse=True), "largest first"
        for batch in batches:
            assert len(batch) <= batch_size and len({(r.height, r.width) for r in batch}) == 1
            for request in batch:
                height, width = scaled_size(tuple(sizes[request.index].tolist()), (160, 160))
                own = (-(-height // 32) * 32, -(-width // 32) * 32)
                is_own = rect and resize == Resize.letterbox
                assert (request.height, request.width) == (own if is_own else (160, 160))
