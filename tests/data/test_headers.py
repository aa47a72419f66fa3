"""One rule for EXIF tags holds for all orientations, file types, formats and programs."""

import json
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import data
from data.headers import read_header
from data.media import Medium, read_picture
from scripts.check_data import check_dataset
from tests.data.conftest import NO_AUGMENT
from tests.data.tagged import BRIGHT, HEIGHT, WIDTH, WRITERS, stored_picture, upright, write_set

NETWORK = (64, np.array([[10.0, 10.0]]), 0.2)
DECODED = [(kind, "opencv", data.DataFormat.coco) for kind in WRITERS]
DECODED += [(kind, "simplejpeg", data.DataFormat.coco) for kind in WRITERS if "jpeg" in kind]
DECODED.append(("png", "opencv", data.DataFormat.yolo))
NOISE = 12  # of a JPEG beside an edge


def tagged_number(annotations: data.Annotations, index: int) -> int:
    return int(Path(annotations.path(index)).stem)


def box_is_bright(image: np.ndarray, box_xyxy: np.ndarray) -> bool:
    """Whether exactly the pixels in the box are the object's, an edge of one pixel aside."""
    left, top, right, bottom = (round(float(value)) for value in box_xyxy)
    bright = image[..., 0].astype(int) > (BRIGHT[0] + 60) // 2
    outside = bright.copy()
    outside[max(0, top - 1) : bottom + 1, max(0, left - 1) : right + 1] = False
    return bool(bright[top + 1 : bottom - 1, left + 1 : right - 1].all() and not outside.any())


@pytest.mark.parametrize(("kind", "decoder", "form"), DECODED)
@pytest.mark.parametrize("frame", ["upright", "stored"])
def test_pixels_and_boxes_are_in_one_frame_in_every_program(frame, form, kind, decoder, tmp_path, monkeypatch) -> None:
    """Annotated upright, or annotated as stored: with ``ignore`` where sizes do not tell."""
    if decoder == "opencv":
        monkeypatch.setattr("data.images.simplejpeg", None)
    else:
        pytest.importorskip("simplejpeg")
    config = write_set(tmp_path / "set", form, kind, frame == "upright")
    if frame == "stored" and form == data.DataFormat.yolo:
        config.exif = data.Exif.ignore
    annotations = data.open_annotations(config, "train")
    if config.exif == data.Exif.apply:
        (note,) = annotations.notes
        assert ("turned upright" if frame == "upright" else "are read as stored") in note and "(7), first: " in note
    source = data.ImageSource(annotations, data.OnError.stop)
    train = data.TrainDataset(annotations, source, NO_AUGMENT, seed=0, epochs=1)
    score = data.EvalDataset(annotations, source)
    for index in range(8):
        tag = tagged_number(annotations, index)
        expected = upright(stored_picture(), tag) if frame == "upright" else stored_picture()
        if kind == "grey jpeg":
            expected = expected[..., :1].repeat(3, axis=2)
        image = source.read(index)
        assert image is not None and image.shape == expected.shape
        assert np.abs(image.astype(int) - expected).max() <= (NOISE if "jpeg" in kind or kind == "avif" else 0)
        assert box_is_bright(image, annotations.training_boxes(index)[1][0])
        whole = source.read(index, rows=5)  # as a tile asks for that shows no more
        assert whole is not None and np.array_equal(whole[:5], image[:5])
        for dataset in (train, score):
            batch = dataset.__getitems__([data.Request(index, 96, 96, 0)])
            cx, cy, w, h = batch.targets[0, 2:].tolist()
            box = np.array([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2])
            assert box_is_bright(batch.images[0].permute(1, 2, 0).numpy(), box)
        exif = data.Exif.apply if frame == "upright" else data.Exif.ignore
        path = Path(annotations.path(index))
        seen = read_picture(Medium(path, path.name), exif)
        assert np.array_equal(seen.image, image), "predict.py sees what an evaluation scores"
        if frame == "upright" and kind != "avif":  # as a client reads it; imread passes over AVIF's turns
            assert np.array_equal(cv2.imread(str(path), cv2.IMREAD_COLOR_RGB), image)
    report = check_dataset(config, *NETWORK)
    kinds = {kind for findings in report.problems.values() for kind in findings.counts}
    assert kinds - {"repeated images"} == {"images in both sets"}


def retag(config: data.DataConfig, sizes: dict[int, tuple[int, int]]) -> None:
    """Write other annotated sizes (height, width) for pictures of a COCO set."""
    path = Path(config.root) / "set.json"
    content = json.loads(path.read_text())
    for image in content["images"]:
        if image["id"] in sizes:
            image["height"], image["width"] = sizes[image["id"]]
    path.write_text(json.dumps(content))


def orientations(config: data.DataConfig) -> list[int]:
    annotations = data.open_annotations(config, "train")
    headers = [read_header(annotations.path(index)) for index in range(len(annotations))]
    sizes = [(height, width) for height, width in annotations.sizes.tolist()]
    return [annotations.turn.orientation(*pair) for pair in zip(headers, sizes, strict=True)]


def test_most_of_the_images_whose_size_tells_decide_for_those_whose_size_does_not(tmp_path: Path) -> None:
    config = write_set(tmp_path / "set", data.DataFormat.coco, "jpeg", False)
    assert orientations(config) == [1] * 8
    retag(config, {6: (WIDTH, HEIGHT)})
    assert orientations(config) == [1, 1, 1, 1, 1, 6, 1, 1], "each whose size tells is taken as it says"
    retag(config, {tag: (WIDTH, HEIGHT) for tag in (5, 6)})
    assert orientations(config) == [1, 2, 3, 4, 5, 6, 1, 1], "as many say the one as the other: upright"
    config = write_set(tmp_path / "squares", data.DataFormat.coco, "jpeg", True, (48, 48))
    assert orientations(config) == [1, 2, 3, 4, 5, 6, 7, 8], "none tells: upright"
    assert orientations(replace(config, exif=data.Exif.ignore)) == [1] * 8


def test_boxes_may_be_upright_where_sizes_are_as_stored(tmp_path: Path) -> None:
    config = write_set(tmp_path / "set", data.DataFormat.coco, "jpeg", True)
    retag(config, {tag: (HEIGHT, WIDTH) for tag in (5, 6, 7, 8)})
    assert orientations(config) == [1, 2, 3, 4, 5, 6, 7, 8]
    annotations = data.open_annotations(config, "train")
    assert sum("width and height that are not (4)" in note for note in annotations.notes) == 1
    source = data.ImageSource(annotations, data.OnError.stop)
    assert all(box_is_bright(source.read(i), annotations.training_boxes(i)[1][0]) for i in range(8))


def test_tiff_files_are_always_turned(tmp_path: Path) -> None:
    picture = Image.fromarray(stored_picture())
    for tag in (3, 6):
        path = tmp_path / f"{tag}.tif"
        picture.save(path, "TIFF", tiffinfo={0x0112: tag})
        image = read_picture(Medium(path, path.name), data.Exif.apply).image
        assert np.array_equal(image, upright(stored_picture(), tag))
        header = read_header(str(path))
        assert header is not None and header.size(1) == image.shape[:2]


def test_a_size_that_fits_neither_is_named(tmp_path: Path) -> None:
    config = write_set(tmp_path / "set", data.DataFormat.coco, "jpeg", True)
    retag(config, {6: (HEIGHT + 1, WIDTH), 3: (HEIGHT, WIDTH + 1)})
    annotations = data.open_annotations(config, "train")
    source = data.ImageSource(annotations, data.OnError.stop)
    said = r"6\.jpg has 64 x 40 pixels, its annotations are for 64 x 41"
    with pytest.raises(data.DataError, match=f"{said}\\. fix: "):
        source.read(5)
    assert check_dataset(config, *NETWORK).problems["train"].counts["images that cannot be read"] == 2
    ignoring = data.open_annotations(replace(config, exif=data.Exif.ignore), "train")
    with pytest.raises(data.DataError, match=r"8\.jpg has 64 x 40 pixels, .* for 40 x 64\. fix: data\.exif=apply"):
        data.ImageSource(ignoring, data.OnError.stop).read(7)
