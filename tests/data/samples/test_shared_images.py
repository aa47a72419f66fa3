"""A sample is the same to the last bit alone, in a batch, and with any decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from enum import EnumType
from itertools import product
from typing import Any, get_type_hints

import cv2
import numpy as np
import pytest
import torch

from data import (
    AugmentConfig,
    Batch,
    CachedImages,
    ImageCache,
    ImageSource,
    MultiScale,
    OnError,
    TrainBatchSampler,
    TrainDataset,
    build_image_cache,
)
from data import images as jpeg
from tests.data.conftest import NO_AUGMENT, CocoSet

# What an option is set to besides its value in NO_AUGMENT; one that is not listed here gets a value
# by its type.
STRONG: dict[str, list[Any]] = {"degrees": [25.0], "shear": [12.0], "perspective": [0.1], "translate": [0.3]}
STRONG |= {"close_mosaic_epochs": [0], "tile_pool": [4], "scale": [0.6]}
SIZES = ((64, 64), (96, 160))
NUM_IMAGES, BATCH = 24, 12


def values(name: str, kind: Any) -> list[Any]:
    if name in STRONG:
        return STRONG[name]
    if isinstance(kind, EnumType):
        members: list[Any] = list(kind)
        return [value for value in members if value != getattr(NO_AUGMENT, name)]
    return [{float: 0.5, int: 2, bool: True}[kind]]


def options() -> Iterator[tuple[str, AugmentConfig]]:
    """Each option of AugmentConfig with rotation, in a mosaic, and all of them together."""
    kinds = get_type_hints(AugmentConfig)
    changes = [
        {field.name: value} for field in fields(AugmentConfig) for value in values(field.name, kinds[field.name])
    ]
    together: dict[str, Any] = {}
    for change in changes:
        together |= change
    bases = {"plain": {}, "rotated": {"degrees": 10.0}, "mosaic": {"mosaic": 1.0}}
    for (base, more), change in product(bases.items(), changes):
        yield f"{base} {change}", replace(NO_AUGMENT, **(more | change))
    yield "together", replace(NO_AUGMENT, **together)


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


class WholeImages(ImageSource):
    """Decode every image to its last row, whatever was asked for."""

    def read(self, index: int, rows: int | None = None) -> Any:
        return super().read(index)


@pytest.fixture(scope="module")
def sources(photographs: CocoSet, tmp_path_factory: pytest.TempPathFactory) -> dict[str, ImageSource]:
    annotations = photographs.open()
    plain = ImageSource(annotations, OnError.stop)
    path = tmp_path_factory.mktemp("cache") / "images"
    build_image_cache(plain, path, ImageCache.disk)
    cached = ImageSource(annotations, OnError.stop, CachedImages(path, annotations))
    return {"files": plain, "whole files": WholeImages(annotations, OnError.stop), "cache": cached}


def parts(batch: Batch, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    of_it = batch.targets[batch.targets[:, 0] == position, 1:]
    return batch.network_input()[position], of_it


@pytest.mark.parametrize("decoder", ["simplejpeg", "opencv"])
def test_a_sample_is_the_same_alone_and_in_its_batch_however_its_images_are_read(
    decoder: str, sources: dict[str, ImageSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every augmentation option, decoder, cache and pool, at two sizes: bit for bit."""
    if decoder == "simplejpeg":
        pytest.importorskip("simplejpeg")
    else:
        monkeypatch.setattr(jpeg, "simplejpeg", None)
    annotations = sources["files"].annotations
    different, compared, threads = [], 0, cv2.getNumThreads()
    for number, (name, augment) in enumerate(options()):
        height, width = SIZES[number % len(SIZES)]
        sampler = TrainBatchSampler(
            NUM_IMAGES, BATCH, BATCH, 1, 0, seed=number, sizes=MultiScale(64, 1, 1, 32, 0), tile_pool=augment.tile_pool
        )
        requests = [replace(request, height=height, width=width) for request in next(iter(sampler))]
        datasets = {key: TrainDataset(annotations, augment, 1, 10, source) for key, source in sources.items()}
        for key, dataset in datasets.items():
            together = dataset.__getitems__(requests)
            for position, request in enumerate(requests):
                compared += 1
                cv2.setNumThreads(0)  # as in a worker of the loader
                alone = datasets["files"][request]
                cv2.setNumThreads(threads)
                if not all(map(torch.equal, parts(together, position), parts(alone, 0))):
                    different.append((name, key, position))
    assert compared > 1000
    assert different == [], f"{len(different)} of {compared} samples differ"
