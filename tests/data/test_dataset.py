"""Samples and batches: their content, which depends on seed, epoch and position alone."""

from dataclasses import replace
from typing import Any

import cv2
import numpy as np
import pytest
import torch

import data
from data.geometry import PAD_VALUE
from tests.data.conftest import EVERY_AUGMENT, NO_AUGMENT, CocoSet, sampler_of

STRONG = replace(
    NO_AUGMENT, mosaic=1, scale=0.6, translate=0.3, flip_horizontal=0.5, flip_vertical=0.5,
    hsv_hue=0.5, hsv_saturation=0.5, hsv_value=0.5,
)  # fmt: skip
AUGMENTS = {
    "plain": NO_AUGMENT,
    "mosaic of four": STRONG,
    "mixup": replace(STRONG, mosaic=0.5, mixup=1),
    "rotated": replace(STRONG, mosaic=0.5, degrees=25, shear=12),
    "device": replace(STRONG, colour=data.Colour.device),
    "pool": replace(STRONG, tile_pool=4, mixup=0.5),
}
SIZES = ((64, 64), (96, 160))
NUM_IMAGES, BATCH = 24, 12


def train_dataset(
    source: data.ImageSource, augment: data.AugmentConfig, seed: int = 3, epochs: int = 10
) -> data.TrainDataset:
    return data.TrainDataset(source.annotations, source, augment, seed=seed, epochs=epochs)


def requests(indices: list[int], epoch: int = 0, side: int = 96) -> list[data.Request]:
    return [data.Request(index, side, side, epoch, pool=(4, 5)) for index in indices]


def sample(batch: data.Batch, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    return batch.images[position], batch.targets[batch.targets[:, 0] == position, 1:]


def test_seed_epoch_position_and_repeat_decide_a_sample(coco_set) -> None:
    source = coco_set.source()
    images = [
        train_dataset(source, EVERY_AUGMENT, seed).__getitems__([data.Request(index, 96, 96, epoch, repeat)]).images
        for seed, epoch, index, repeat in ((3, 0, 4, 0), (4, 0, 4, 0), (3, 1, 4, 0), (3, 0, 5, 0), (3, 0, 4, 1))
    ]
    assert not any(torch.equal(images[0], other) for other in images[1:])
    dataset = train_dataset(source, EVERY_AUGMENT)
    dataset.__getitems__([data.Request(0, 64, 64, 0)])  # a past of its own
    assert torch.equal(images[0], dataset.__getitems__([data.Request(4, 96, 96, 0)]).images)


def test_crowds_are_no_targets(coco_set) -> None:
    coco_set.add_image(np.zeros((90, 90, 3), dtype=np.uint8), [(1, [5, 5, 30, 30]), (7, [40, 40, 30, 30])], iscrowd=0)
    coco_set.json["annotations"][-1]["iscrowd"] = 1
    source = coco_set.source()
    for augment in (NO_AUGMENT, replace(NO_AUGMENT, mosaic=1.0)):
        targets = train_dataset(source, augment).__getitems__([data.Request(7, 96, 96, 0, pool=(7,))]).targets
        assert len(targets) >= 1 and set(targets[:, 1].tolist()) == {0.0}, "of the dog, never of the crowd of birds"


def test_the_last_epochs_do_without_mosaic_and_mixup(coco_set) -> None:
    dataset = train_dataset(coco_set.source(), replace(NO_AUGMENT, mosaic=1, mixup=1, close_mosaic_epochs=2), epochs=8)
    plain = train_dataset(coco_set.source(), NO_AUGMENT)
    for epoch in range(8):
        batch, expected = dataset.__getitems__(requests([1], epoch)), plain.__getitems__(requests([1], epoch))
        assert torch.equal(batch.images, expected.images) == (epoch >= 6)


@pytest.mark.parametrize("resize", list(data.Resize))
def test_eval_batch(resize: data.Resize, coco_set) -> None:
    source = coco_set.source()
    annotations = source.annotations
    batch = data.EvalDataset(annotations, source, resize=resize).__getitems__(requests([0, 3], side=64))
    for position, index in enumerate((0, 3)):
        _, targets = sample(batch, position)
        ratio_x, ratio_y, pad_x, pad_y = batch.letterboxes[position].tolist()
        if resize == data.Resize.stretch:
            height, width = annotations.sizes[index].tolist()
            assert (ratio_x * width, ratio_y * height, pad_x, pad_y) == pytest.approx((64, 64, 0, 0))
        expected = annotations.training_boxes(index)[1] * np.array([ratio_x, ratio_y] * 2) + np.array(
            [pad_x, pad_y] * 2
        )
        found = torch.cat([targets[:, 1:3] - targets[:, 3:] / 2, targets[:, 1:3] + targets[:, 3:] / 2], dim=1).numpy()
        assert np.allclose(found, expected, atol=1e-4)
        assert targets[:, 0].tolist() == annotations.training_boxes(index)[0].tolist()
    assert batch.indices.tolist() == [0, 3]


def test_the_validation_loss_has_no_targets_that_a_training_drops(coco_set) -> None:
    coco_set.add_image(np.zeros((90, 90, 3), dtype=np.uint8), [(1, [5, 5, 30, 30]), (7, [40, 40, 0.5, 0.5])])
    source = coco_set.source()
    trained = train_dataset(source, NO_AUGMENT).__getitems__(requests([7]))
    assert (
        trained.targets.tolist()
        == data.EvalDataset(source.annotations, source).__getitems__(requests([7])).targets.tolist()
    )
    assert len(trained.targets) == 1


def test_an_unreadable_image_is_grey(coco_set) -> None:
    annotations = coco_set.open()
    (coco_set.root / "images" / "13.png").write_bytes(b"no image")
    source = data.ImageSource(annotations, data.OnError.skip)
    trained = data.TrainDataset(annotations, source, NO_AUGMENT, seed=0, epochs=1).__getitems__(requests([3]))
    assert (trained.images == PAD_VALUE).all() and trained.targets.shape == (0, 6)
    evaluated = data.EvalDataset(annotations, source).__getitems__(requests([3]))
    assert (evaluated.images == PAD_VALUE).all() and len(evaluated.targets) == len(annotations.training_boxes(3)[0])


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> CocoSet:
    """Smooth pictures with noise as JPEG files; some are larger than a sample."""
    made = CocoSet(tmp_path_factory.mktemp("shared") / "set")
    generator = np.random.default_rng(5)
    samplings = (0x111111, 0x211111, 0x221111, 0x411111)
    for number in range(NUM_IMAGES):
        height, width = generator.integers(40, 180, 2).tolist()
        y, x = np.mgrid[:height, :width]
        planes = [127 + 90 * np.sin(x * f + y * g) for f, g in generator.uniform(0.02, 0.3, (3, 2))]
        image = (np.stack(planes, 2) + generator.normal(0, 10, (height, width, 3))).clip(0, 255).astype(np.uint8)
        boxes = [(3, [width * 0.1, height * 0.2, width * 0.5, height * 0.6]), (7, [2, 3, width * 0.4, height * 0.4])]
        made.add_image(image, boxes)
        record = made.json["images"][-1]
        record["file_name"] = f"{number}.jpg"
        flags = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, samplings[number % 4], cv2.IMWRITE_JPEG_PROGRESSIVE, number // 4 % 2]
        assert cv2.imwrite(str(made.root / "images" / record["file_name"]), image, flags)
    return made


class WholeImages(data.ImageSource):
    """Decode every image to its last row, whatever was asked for."""

    def read(self, index: int, rows: int | None = None) -> Any:
        return super().read(index)


@pytest.fixture(scope="module")
def sources(photographs: CocoSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, data.ImageSource]:
    annotations = photographs.open()
    plain = data.ImageSource(annotations, data.OnError.stop)
    path = tmp_path_factory.mktemp("cache") / "images"
    data.build_image_cache(plain, path, data.ImageCache.disk)
    cached = data.ImageSource(annotations, data.OnError.stop, path)
    return {"files": plain, "whole files": WholeImages(annotations, data.OnError.stop), "cache": cached}


@pytest.mark.parametrize("decoder", ["simplejpeg", "opencv"])
@pytest.mark.parametrize("augment", AUGMENTS.values(), ids=AUGMENTS.keys())
def test_a_sample_is_the_same_alone_and_in_its_batch_however_its_images_are_read(
    augment: data.AugmentConfig, decoder: str, sources: dict[str, data.ImageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr("data.images.simplejpeg", None)
    annotations, threads = sources["files"].annotations, cv2.getNumThreads()
    datasets = {
        key: data.TrainDataset(annotations, source, augment, seed=1, epochs=10) for key, source in sources.items()
    }
    for seed, (height, width) in enumerate(SIZES):
        for batch in sampler_of(NUM_IMAGES, BATCH, seed=seed, tile_pool=augment.tile_pool):
            requests = [replace(request, height=height, width=width) for request in batch]
            cv2.setNumThreads(0)  # as in a worker of the loader
            alone = [datasets["files"].__getitems__([request]) for request in requests]
            cv2.setNumThreads(threads)
            for key, dataset in datasets.items():
                together = dataset.__getitems__(requests)
                images = together.network_input()
                for position, one in enumerate(alone):
                    assert torch.equal(images[position], one.network_input()[0]), (key, position)
                    assert torch.equal(sample(together, position)[1], one.targets[:, 1:]), (key, position)
