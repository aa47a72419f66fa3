"""Images that were there when the index was built, and are not when they are read."""

import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

import data
from data import DataError, OnError, Request
from data.loader import BatchLoader
from tests.data.conftest import EVERY_AUGMENT, NO_AUGMENT, CocoSet

COUNT = 24
LAST = DataError("b.jpg", "go")


@pytest.fixture
def jpeg_set(empty_set: CocoSet) -> CocoSet:
    image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    for _ in range(COUNT):
        empty_set.add_image(image, [(1, [5, 5, 20, 20])])
        record = empty_set.json["images"][-1]
        record["file_name"] = f"{record['id']}.jpg"
        assert cv2.imwrite(str(empty_set.root / "images" / record["file_name"]), image)
    for path in (empty_set.root / "images").glob("*.png"):
        path.unlink()
    return empty_set


def rewrite(folder: Path, cut: Callable[[bytes], bytes], count: int = COUNT) -> None:
    for path in sorted(folder.iterdir())[:count]:
        path.write_bytes(cut(path.read_bytes()))


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


FAULTS: dict[str, Callable[[Path], object]] = {
    "removed": shutil.rmtree,
    "emptied": empty,
    "zero bytes": lambda folder: rewrite(folder, lambda _: b""),
    "cut short": lambda folder: rewrite(folder, lambda content: content[: len(content) // 2]),
}


def loader_of(source: data.ImageSource, kind: str, workers: int) -> BatchLoader:
    """Loads all images in batches of 4, with ``rect`` as wide as they are."""
    width, pool = 96 if kind == "rect" else 64, tuple(range(COUNT))
    batches = [[Request(i + k, 64, width, 0, pool=pool) for k in range(4)] for i in range(0, COUNT, 4)]
    augment = EVERY_AUGMENT if kind == "mosaic" else NO_AUGMENT
    trained = data.TrainDataset(source.annotations, source, augment, seed=0, epochs=1)
    return data.make_loader(
        data.EvalDataset(source.annotations, source) if kind == "val" else trained, batches, workers
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize(("kind", "workers"), [("mosaic", 2), ("rect", 0), ("val", 0)])
def test_a_folder_that_goes_bad_stops_the_next_epoch_and_the_next_start(kind, workers, fault, jpeg_set) -> None:
    source = jpeg_set.source(on_error=OnError.skip)
    loader = loader_of(source, kind, workers)
    assert len(list(loader)) == COUNT // 4
    FAULTS[fault](jpeg_set.root / "images")
    said = r"images, a folder of images, is gone, empty or unreadable|\d+ of 24 images cannot be read, the last one: .*"
    with pytest.raises(DataError, match=rf"({said}).* fix: re") as caught:
        list(loader)
    assert "on_error" not in str(caught.value)
    if workers:
        loader._iterator._shutdown_workers()  # else torch waits 5 s for a worker that had an error
    for on_error in OnError:
        with pytest.raises(DataError, match=r"images.* fix: (restore|replace)"):
            data.ImageSource(source.annotations, on_error).read_sample()


@pytest.mark.parametrize("workers", [0, 2])
def test_damaged_images_count_in_each_epoch(workers: int, jpeg_set: CocoSet, caplog: pytest.LogCaptureFixture) -> None:
    source = jpeg_set.source(on_error=OnError.skip)
    rewrite(jpeg_set.root / "images", lambda _: b"", 6)
    loader = loader_of(source, "mosaic", workers)
    source.quiet = True  # the first rank of the node reads the same ones
    source.read_sample()
    assert "left out" not in caplog.text and source.take_left_out()[0] == 0
    for _ in range(2):
        assert len(list(loader)) == COUNT // 4
        left_out = source.take_left_out()
        assert left_out.tolist() == [0, 1, 2, 3, 4, 5] and not len(source.take_left_out())
        assert source.check_left_out(6, LAST) == "6 of 24 images cannot be read, the last one: b.jpg. fix: go"
    with pytest.raises(DataError, match="7 of 24 images"):
        source.check_left_out(7, LAST)


def test_20_in_a_row_are_too_many_of_any_set(jpeg_set: CocoSet, tmp_path: Path) -> None:
    records, boxes = jpeg_set.json["images"], jpeg_set.json["annotations"]
    jpeg_set.json["images"] = [{**records[i % COUNT], "id": i} for i in range(3000)]
    jpeg_set.json["annotations"] = [{**boxes[0], "image_id": 0}]
    source = jpeg_set.source(on_error=OnError.skip)
    assert source.read(0) is not None
    assert source.check_left_out(30, LAST) and source.check_left_out(20, LAST)  # 1 %, if not in a row
    with pytest.raises(DataError, match=r"31 of 3,000 images"):
        source.check_left_out(31, LAST)
    rewrite(jpeg_set.root / "images", lambda _: b"", 20)
    with pytest.raises(DataError, match=r"20 of 3,000 images cannot be read"):
        [source.read(index) for index in range(20)]
