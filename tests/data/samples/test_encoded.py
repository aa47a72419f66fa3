"""Samples that the device draws, against those that workers draw, and who draws which."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from data import (
    AugmentConfig,
    Batch,
    Colour,
    DataError,
    DataFormat,
    EncodedDataset,
    ImageSource,
    MultiScale,
    OnError,
    Request,
    TrainBatchSampler,
    TrainDataset,
    make_loader,
    open_annotations,
)
from data.samples.encoded import EncodedBatch
from data.samples.resample import resample
from tests.data.conftest import NO_AUGMENT
from tests.data.drawn_set import DrawnSet, picture
from tests.data.tagged import write_set

CPU = torch.device("cpu")
ON_DEVICE = replace(NO_AUGMENT, colour=Colour.device, hsv_hue=0.1)
MOSAIC = replace(ON_DEVICE, mosaic=1, scale=0.5, translate=0.1, flip_horizontal=0.5, flip_vertical=0.5)
AUGMENTS = {
    "letterbox": ON_DEVICE,
    "flips": replace(ON_DEVICE, flip_horizontal=0.5, flip_vertical=0.5),
    "zoom and shift": replace(ON_DEVICE, scale=0.5, translate=0.3),
    "four": MOSAIC,
    "nine": replace(MOSAIC, mosaic_nine=1),
    "some": replace(MOSAIC, mosaic=0.5, mosaic_nine=0.5, mixup=0.5),
    "mixup": replace(MOSAIC, mixup=1),
    "last epochs": replace(MOSAIC, close_mosaic_epochs=1),
    "degrees": replace(MOSAIC, degrees=20),
    "shear": replace(ON_DEVICE, shear=15, scale=0.3),
    "perspective": replace(MOSAIC, mosaic=0.5, perspective=0.1),
    "all": replace(MOSAIC, degrees=180, shear=15, perspective=0.1, mixup=0.5),
}
TURNED = ("degrees", "shear", "perspective", "all")  # by a warp, which blends the edges of a tile
LEVELS = 2  # that two ways to round a linear interpolation may differ by


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> ImageSource:
    return source_of(DrawnSet(tmp_path_factory.mktemp("drawn") / "set"))


def source_of(drawn: DrawnSet, on_error: OnError = OnError.stop) -> ImageSource:
    return ImageSource(open_annotations(drawn.config(DataFormat.coco), "train"), on_error)


def both(source: ImageSource, augment: AugmentConfig, requests: Sequence[Request]) -> tuple[Batch, EncodedBatch]:
    """The batch as workers draw it, and as they hand it to the device."""
    made_of = source.annotations, augment, 3, 2, source
    return TrainDataset(*made_of).__getitems__(requests), EncodedDataset(*made_of).__getitems__(requests)


def difference(one: Batch, other: Batch) -> torch.Tensor:
    """Levels (B, H, W) between the images; all else is equal."""
    for name in ("targets", "indices", "letterboxes", "gains"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name
    assert one.images.shape == other.images.shape and other.images.dtype == torch.uint8
    assert other.images.is_contiguous(memory_format=torch.channels_last)
    return (one.images.int() - other.images.int()).abs().amax(dim=1)


def edges(batch: EncodedBatch) -> torch.Tensor:
    """Pixels (B, H, W) of which another tile is less than three pixels away; workers drew none."""
    height, width = batch.images.shape[2:]
    shapes = [cv2.imdecode(file.numpy(), cv2.IMREAD_COLOR).shape for file in batch._each_file()]
    numbered = [  # each tile as a flat image of its own
        torch.full((3, *shapes[file][:2]), number % batch.tiles.shape[1], dtype=torch.uint8)
        for number, file in enumerate(batch.tiles.view(-1).tolist())
    ]
    tiles = torch.arange(len(numbered)).view(batch.tiles.shape).where(batch.tiles >= 0, -1)
    pictures = resample(numbered, tiles, batch.maps, (height, width))[..., 0].float()[:, None]
    pictures = F.pad(pictures, (2, 2, 2, 2), mode="replicate")
    beside = (F.max_pool2d(pictures, 5, 1) != -F.max_pool2d(-pictures, 5, 1))[:, 0]
    found = beside[: len(batch.places)]
    found[batch.mixed] |= beside[len(batch.places) :]
    return found[batch.places]


@pytest.mark.parametrize("name", AUGMENTS)
def test_the_device_draws_what_workers_draw(drawn: ImageSource, name: str) -> None:
    for height, width in ((96, 96), (64, 160), (160, 96)):
        requests = [Request(index, height, width, epoch) for epoch in (0, 1) for index in range(5)]
        expected, encoded = both(drawn, AUGMENTS[name], requests)
        assert len(encoded.images) == 0, "a worker drew a sample"
        levels = difference(expected, encoded.to(CPU))
        assert levels.float().mean() < 1
        if name not in TURNED:
            assert levels.max() <= LEVELS
            continue
        inside = ~edges(encoded)  # one pixel in ten thousand: the corner of a tile that begins outside
        assert (levels[inside] > LEVELS).float().mean() < 5e-4 and inside.float().mean() > 0.8


def test_a_pool_of_tiles_is_sent_once(drawn: ImageSource) -> None:
    requests = [Request(index, 96, 96, 0, pool=tuple(range(5))) for index in range(5)]
    expected, encoded = both(drawn, MOSAIC, requests)
    assert len(encoded.ends) <= 5 and difference(expected, encoded.to(CPU)).max() <= LEVELS


def test_a_sample_depends_neither_on_its_batch_nor_on_workers(drawn: ImageSource) -> None:
    annotations, augment = drawn.annotations, AUGMENTS["all"]
    dataset = EncodedDataset(annotations, augment, 3, 2, drawn)
    epochs = []
    for workers in (0, 1):
        sampler = TrainBatchSampler(5, 2, 2, 1, 0, 0, MultiScale(96, 0.5, 1.5, 32, 0))
        sampler.set_epoch(1, 0)
        epochs.append([batch.to(CPU) for batch in make_loader(dataset, sampler, workers)])
    requests = [request for batch in sampler for request in batch]
    alone = [dataset[request].to(CPU) for request in requests]
    for ours in epochs:
        images = [image for batch in ours for image in batch.images]
        assert all(torch.equal(image, other.images[0]) for image, other in zip(images, alone, strict=True))
        assert sum(len(batch.targets) for batch in ours) == sum(len(other.targets) for other in alone)


@pytest.mark.parametrize(("kind", "sent"), [("jpeg", 8), ("grey jpeg", 8), ("progressive jpeg", 0), ("png", 0)])
@pytest.mark.parametrize("annotated_upright", [True, False])
def test_all_kinds_of_files_are_turned_alike(tmp_path: Path, kind: str, sent: int, annotated_upright: bool) -> None:
    config = write_set(tmp_path / "set", DataFormat.coco, kind, annotated_upright)
    source = ImageSource(open_annotations(config, "train"), OnError.stop)
    expected, encoded = both(source, ON_DEVICE, [Request(index, 96, 96, 0) for index in range(8)])
    assert len(encoded.ends) == sent and len(encoded.images) == 8 - sent
    assert difference(expected, encoded.to(CPU)).max() <= (LEVELS if sent else 0)


def test_a_batch_of_all_that_workers_draw_themselves(tmp_path: Path) -> None:
    """Each sample in its place: CMYK, a file of many bytes, one of many pixels."""
    drawn = DrawnSet(tmp_path / "set")
    file = io.BytesIO()
    Image.fromarray(picture(np.random.default_rng(1))).convert("CMYK").save(file, "JPEG")
    drawn.image("train", 1).write_bytes(file.getvalue())
    noise = np.random.default_rng(2).integers(0, 256, (96, 128, 3), dtype=np.uint8)
    cv2.imwrite(str(drawn.image("train", 2)), noise, [cv2.IMWRITE_JPEG_QUALITY, 100])
    drawn.add("train", 5, cv2.resize(picture(np.random.default_rng(3)), (640, 480)), quality=5)
    source = source_of(drawn)
    requests = [Request(index, 96, 96, 0) for index in range(6)]
    assert len(drawn.image("train", 2).read_bytes()) > 2 * 64 * 64 * 3 > len(drawn.image("train", 0).read_bytes())
    for side, kept in ((64, (1, 2, 5)), (160, (1,))):
        expected, encoded = both(source, ON_DEVICE, [replace(one, height=side, width=side) for one in requests])
        assert len(encoded.files) <= 2 * 6 * 3 * side**2 and len(encoded.images) == len(kept)
        levels = difference(expected, encoded.to(CPU))
        assert levels[list(kept)].max() == 0 and levels.max() <= LEVELS


def test_copied_objects_are_drawn_by_workers(tmp_path: Path) -> None:
    config = replace(write_set(tmp_path / "set", DataFormat.coco, "jpeg", True), outlines=True)
    source = ImageSource(open_annotations(config, "train"), OnError.stop)
    augment = replace(MOSAIC, copy_paste=0.5)
    expected, encoded = both(source, augment, [Request(index, 96, 96, 0) for index in range(8)])
    assert 0 < len(encoded.images) < 8
    assert difference(expected, encoded.to(CPU)).float().mean() < 0.1


def test_a_broken_file_is_named_by_whom_it_breaks(tmp_path: Path) -> None:
    drawn = DrawnSet(tmp_path / "set")
    annotations, path = open_annotations(drawn.config(DataFormat.coco), "train"), drawn.image("train", 3)
    requests, whole = [Request(index, 96, 96, 0) for index in range(5)], path.read_bytes()
    stop, skip = ImageSource(annotations, OnError.stop), ImageSource(annotations, OnError.skip)
    path.write_bytes(whole[:-40])
    with pytest.raises(DataError, match=r"3\.jpg is cut short"):
        both(stop, ON_DEVICE, requests)
    expected, encoded = both(skip, ON_DEVICE, requests)  # a grey sample without boxes
    assert difference(expected, encoded.to(CPU)).max() <= LEVELS and (encoded.images == 114).all()
    start = whole.index(b"\xff\xc4") + 4
    path.write_bytes(whole[:start] + b"\xff" * 20 + whole[start + 20 :])
    for source in (stop, skip):
        dataset = EncodedDataset(annotations, ON_DEVICE, 3, 2, source)
        with pytest.raises(DataError, match=r"3\.jpg cannot be decoded on the cpu \(.*\)\. fix: .*data\.decode=cpu"):
            dataset.__getitems__(requests).to(CPU)


def test_no_file_and_no_tile(drawn: ImageSource) -> None:
    dataset = EncodedDataset(drawn.annotations, ON_DEVICE, 3, 2, drawn)
    batch = dataset.__getitems__([Request(0, 96, 96, 0)])
    nothing = replace(
        batch, files=batch.files[:0], ends=batch.ends[:0], tiles=batch.tiles[:, :0], maps=batch.maps[:, :0]
    )
    assert (nothing.to(CPU).images == 114).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_what_a_cpu_draws(drawn: ImageSource) -> None:
    """Up to chroma, which libjpeg interpolates and nvJPEG repeats; while the device is busy."""
    dataset = EncodedDataset(drawn.annotations, MOSAIC, 3, 2, drawn)
    sampler = TrainBatchSampler(5, 1, 1, 1, 0, 0, MultiScale(96, 0.5, 1.5, 32, 0))
    host = [batch.to(CPU) for batch in make_loader(dataset, sampler, 0)]
    busy = torch.ones(4096, 4096, device="cuda")
    epochs = []
    for _ in range(4):
        images = []
        for expected, batch in zip(host, make_loader(dataset, sampler, 2, torch.device("cuda", 0)), strict=True):
            for _ in range(20):
                busy = busy @ busy * 1e-4
            assert torch.equal(batch.targets.cpu(), expected.targets)
            images.append(batch.images.cpu())
            assert (images[-1].float() - expected.images.float()).abs().mean() < 4
        epochs.append(images)
    for images in epochs:
        assert all(torch.equal(one, other) for one, other in zip(epochs[0], images, strict=True))
