"""Samples and batches: their content, which depends on seed, epoch and position alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from data import AugmentConfig, Batch, EvalDataset, ImageSource, OnError, Request, Resize, TrainDataset
from data.geometry import PAD_VALUE


def train_dataset(source: ImageSource, augment: AugmentConfig, seed: int = 3, epochs: int = 10) -> TrainDataset:
    return TrainDataset(source.annotations, augment, seed, epochs, source)


def requests(indices: list[int], epoch: int = 0, side: int = 96) -> list[Request]:
    return [Request(index, side, side, epoch) for index in indices]


def sample(batch: Batch, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images[position], batch.targets[batch.targets[:, 0] == position, 1:]


def test_batch_layout(coco_set, every_augment: AugmentConfig) -> None:
    batch = train_dataset(coco_set.source(), every_augment).__getitems__(requests([3, 1, 0]))
    assert batch.images.dtype == torch.uint8 and batch.images.shape == (3, 3, 96, 96)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.targets.dtype == torch.float32 and batch.targets.shape[1] == 6
    assert batch.indices.tolist() == [3, 1, 0] and batch.indices.dtype == torch.int64
    assert batch.letterboxes.shape == (0, 4) and batch.letterboxes.dtype == torch.float64
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.images, batch.images) and moved.images.is_contiguous(memory_format=torch.channels_last)


def test_a_sample_does_not_depend_on_its_batch(coco_set, every_augment: AugmentConfig) -> None:
    dataset = train_dataset(coco_set.source(), every_augment)
    together = dataset.__getitems__(requests([5, 2, 6]))
    for position, index in enumerate([5, 2, 6]):
        alone = dataset[Request(index, 96, 96, 0)]
        for first, second in zip(sample(together, position), sample(alone, 0), strict=True):
            assert torch.equal(first, second)


def test_seed_epoch_and_position_change_a_sample(coco_set, every_augment: AugmentConfig) -> None:
    source = coco_set.source()
    images = [
        train_dataset(source, every_augment, seed)[Request(index, 96, 96, epoch)].images
        for seed, epoch, index in ((3, 0, 4), (4, 0, 4), (3, 1, 4), (3, 0, 5), (3, 0, 4))
    ]
    assert torch.equal(images[0], images[4])
    assert not any(torch.equal(images[0], other) for other in images[1:4])


def test_the_last_epochs_do_without_mosaic(coco_set, no_augment: AugmentConfig) -> None:
    dataset = train_dataset(coco_set.source(), replace(no_augment, mosaic=1, close_mosaic_epochs=2), epochs=8)
    plain = train_dataset(coco_set.source(), no_augment)
    for epoch in range(8):
        batch, expected = dataset.__getitems__(requests([1], epoch)), plain.__getitems__(requests([1], epoch))
        assert torch.equal(batch.images, expected.images) == (epoch >= 6)


def test_without_augmentation_a_sample_is_the_enlarged_letterbox(coco_set, no_augment: AugmentConfig) -> None:
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    coco_set.add_image(image, [(1, [10, 20, 30, 25])])
    source = coco_set.source()
    batch = train_dataset(source, no_augment).__getitems__(requests([7], side=192))
    expected = EvalDataset(source.annotations, source, upscale=True).__getitems__(requests([7], side=192))
    assert torch.equal(batch.targets, expected.targets)
    difference = (batch.images.int() - expected.images.int()).abs()
    difference[..., [0, -1]] = 0  # the warp blends the image's outermost pixels with the grey behind them
    difference[..., [32, -33], :] = 0
    assert difference.max() <= 1


@pytest.mark.parametrize("resize", list(Resize))
def test_eval_batch(resize: Resize, coco_set) -> None:
    source = coco_set.source()
    annotations = source.annotations
    batch = EvalDataset(annotations, source, resize=resize).__getitems__(requests([0, 3], side=64))
    for position, index in enumerate((0, 3)):
        _, targets = sample(batch, position)
        ratio_x, ratio_y, pad_x, pad_y = batch.letterboxes[position].tolist()
        if resize == Resize.stretch:
            height, width = annotations.sizes[index].tolist()
            assert (ratio_x * width, ratio_y * height, pad_x, pad_y) == pytest.approx((64, 64, 0, 0))
        else:
            assert ratio_x <= 1 and ratio_y <= 1, "small images are not enlarged"
        expected = annotations.boxes_xyxy(index) * np.array([ratio_x, ratio_y] * 2) + np.array([pad_x, pad_y] * 2)
        found = torch.cat([targets[:, 1:3] - targets[:, 3:] / 2, targets[:, 1:3] + targets[:, 3:] / 2], dim=1).numpy()
        assert np.allclose(found, expected, atol=1e-4)
        assert targets[:, 0].tolist() == annotations.training_boxes(index)[0].tolist()
    assert batch.indices.tolist() == [0, 3]


def test_a_small_image_is_centred_untouched(coco_set) -> None:
    source = coco_set.source()
    batch = EvalDataset(source.annotations, source).__getitems__(requests([2], side=128))
    pixels = source.read(2)
    assert pixels is not None
    _, _, pad_x, pad_y = (int(number) for number in batch.letterboxes[0])
    height, width = pixels.shape[:2]
    inner = batch.images[0].permute(1, 2, 0).numpy()[pad_y : pad_y + height, pad_x : pad_x + width]
    assert np.array_equal(inner, pixels)


def test_no_boxes_at_all(coco_set, every_augment: AugmentConfig) -> None:
    coco_set.json["annotations"] = []
    annotations = coco_set.open("val")
    source = ImageSource(annotations, OnError.stop)
    for dataset in (TrainDataset(annotations, every_augment, 0, 1, source), EvalDataset(annotations, source)):
        assert dataset.__getitems__(requests([0, 1])).targets.shape == (0, 6)


def test_an_unreadable_image_is_grey(coco_set, no_augment: AugmentConfig) -> None:
    annotations = coco_set.open()
    (coco_set.root / "images" / "13.png").write_bytes(b"no image")
    source = ImageSource(annotations, OnError.skip)
    trained = TrainDataset(annotations, no_augment, 0, 1, source).__getitems__(requests([3]))
    assert (trained.images == PAD_VALUE).all() and trained.targets.shape == (0, 6)
    evaluated = EvalDataset(annotations, source).__getitems__(requests([3]))
    assert (evaluated.images == PAD_VALUE).all() and len(evaluated.targets) == len(annotations.training_boxes(3)[0])


def test_one_batch_has_one_size(coco_set, no_augment: AugmentConfig) -> None:
    dataset = train_dataset(coco_set.source(), no_augment)
    with pytest.raises(AssertionError, match="one size per batch"):
        dataset.__getitems__([Request(0, 96, 96, 0), Request(1, 64, 64, 0)])
