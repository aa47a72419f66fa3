"""``Detector`` finds what predict.py finds, from any input and thread, and says what is wrong."""

import json
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torchvision
from PIL import Image, ImageOps, ImageShow

from conf import ConfigError, TrainError, schema
from conf.cli.command_line import override
from data import DataError
from data.shapes import CLASSES
from predict import Detector, predict
from tests.data.test_media import picture, video
from tests.test_predict import IDS, folder

__all__ = ["folder"]  # a fixture
LOW = {"confidence": 0.6, "device": "cpu"}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Of several sizes and kinds: colour, grey, turned by an EXIF tag, without anything on it."""
    path = tmp_path_factory.mktemp("pictures")
    for number, size in enumerate([(60, 80), (80, 60), (150, 200), (60, 80)], start=1):
        picture(path / f"{number}.png", *size)
    cv2.imwrite(str(path / "5.png"), cv2.imread(str(path / "1.png"), cv2.IMREAD_GRAYSCALE))
    cv2.imwrite(str(path / "6.png"), np.zeros((64, 64, 3), np.uint8))
    tags = Image.Exif()
    tags[0x0112] = 6
    for name in ("7.png", "8.jpg"):
        Image.open(path / "3.png").save(path / name, exif=tags)
    return sorted(path.iterdir())


def by_predict(checkpoint: Path, source: Path, out: Path, options: dict[str, Any]) -> list[dict[str, Any]]:
    given = {"ckpt": checkpoint, "source": source, "out": out, "draw": False, "save_txt": False, **options}
    predict([override(key, value) for key, value in given.items()])
    rows: list[dict[str, Any]] = json.loads((out / "detections.json").read_text())
    return rows


@pytest.mark.parametrize(
    "options",
    [
        {}, {"resize": "stretch", "multi_label": True}, {"rect": False, "image_size": 64, "merge_nms": True},
        {"exif": "ignore", "precision": "bfloat16", "batch_size": 3, "max_detections": 5, "nms_iou": 0.3},
    ],
)  # fmt: skip
def test_the_bits_are_those_of_predict(folder, pictures, options, tmp_path) -> None:
    expected = by_predict(folder / "random.pt", pictures[0].parent, tmp_path, LOW | options)
    found = Detector(folder / "random.pt", **LOW, **options)(pictures)
    assert [row for number, one in enumerate(found, 1) for row in one.to_coco(number)] == expected
    assert len(expected) > 10 and {row["category_id"] for row in expected} == set(IDS)
    assert [prediction.path for prediction in found] == pictures
    counts = np.bincount([row["image_id"] for row in expected], minlength=9)[1:]
    assert [len(prediction) for prediction in found] == counts.tolist()


def test_a_path_and_an_array_are_one_picture_and_nothing_is_written(folder, pictures, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "a" / "b"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").touch()
    shutil.copy(folder / "random.pt", run / "checkpoints" / "best.pt")
    before = sorted(tmp_path.rglob("*"))
    detector = Detector("last", **LOW)
    assert repr(detector).startswith("<Detector runs/a/b: ")
    for path in pictures:
        pixels = cv2.imread(str(path))
        assert pixels is not None
        alone, listed = [detector(str(path)), detector(path), detector(pixels)], detector([pixels, path])
        mirrored = pixels[:, :, ::-1].copy()
        alone.append(detector(mirrored[:, :, ::-1]))
        mirrored[:] = 0  # a caller's own picture, which may be the next one by now
        if path.suffix == ".png":  # Pillow decodes a JPEG otherwise
            alone.append(detector(Image.open(path)))
            listed += detector([Image.open(path)])
        for other in (*alone, *listed):
            one = (alone if other in alone else listed)[0]
            assert other.boxes_xyxy.tobytes() == one.boxes_xyxy.tobytes()
            assert np.array_equal(other.scores, one.scores) and np.array_equal(other.classes, one.classes)
            assert np.array_equal(other.image, pixels)
            np.testing.assert_allclose(one.scores, alone[0].scores, rtol=1e-4)
    many = [pictures[number % 2] for number in range(11)]
    assert [found.path for found in detector(many)] == many, "more than nine, in their order"
    assert sorted(tmp_path.rglob("*")) == before
    turned, stored = cv2.imread(str(pictures[6])), cv2.imread(str(pictures[6]), cv2.IMREAD_IGNORE_ORIENTATION)
    assert np.array_equal(detector(pictures[6]).image, turned) and turned.shape != stored.shape


@pytest.mark.parametrize("exif", ["apply", "ignore"])
def test_a_pillow_image_is_its_file_in_any_mode_and_turned_alike(folder: Path, tmp_path: Path, exif: str) -> None:
    """OpenCV reads the files. An image that was turned, cut or converted is as it was made."""
    detector = Detector(folder / "random.pt", exif=exif, **LOW)
    image = Image.fromarray(picture(tmp_path / "a.png", 60, 80))
    deep = Image.fromarray(np.arange(0, 60 * 80 * 13, 13, dtype=np.uint16).reshape(60, 80))
    tags = Image.Exif()
    tags[0x0112] = 6
    modes = [deep, *(image.convert(mode) for mode in ("1", "L", "P", "LA", "RGBA", "RGB"))]
    for number, each in enumerate(modes):
        for suffix, more in (("png", {}), ("tiff", {"compression": "tiff_lzw"})):
            path = tmp_path / f"{number}.{suffix}"  # Pillow itself garbles a turned grey TIFF without compression
            each.save(path, exif=tags, **more)
            expected = detector(path).image
            assert np.array_equal(detector(Image.open(path)).image, expected), path
            assert expected.shape == ((80, 60, 3) if suffix == "tiff" or exif == "apply" else (60, 80, 3))
    opened = Image.open(path.with_suffix(".png"))
    for made in (ImageOps.exif_transpose(opened), image.crop((5, 6, 50, 40)), image.convert("CMYK")):
        assert np.array_equal(detector(made).image, np.asarray(made.convert("RGB"))[..., ::-1])


def test_what_is_read_as_it_comes_is_an_iterator(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    detector = Detector(folder / "random.pt", **LOW)
    video(tmp_path / "film.avi", 7)
    expected = by_predict(folder / "random.pt", tmp_path / "film.avi", tmp_path / "out", LOW)
    frames = list(detector(tmp_path / "film.avi"))
    assert [prediction.frame.number for prediction in frames] == [1, 2, 3, 4, 5, 6, 7]
    assert [row for number, frame in enumerate(frames, 1) for row in frame.to_coco(number)] == expected
    threads = torch.get_num_threads()
    one, other = detector(tmp_path / "film.avi"), detector(str(pictures[0].parent))
    assert next(one).frame.number == 1 and next(other).path in pictures  # neither has to end before the other
    one.close()
    assert len(list(other)) == len(pictures) - 1
    assert torch.get_num_threads() == threads
    assert detector([]) == []


def test_a_call_has_its_own_limits_in_any_thread(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    low, high = ({**LOW, "confidence": value} for value in (0.6, 0.7))
    detector, strict = (Detector(folder / "random.pt", **options) for options in (low, high))

    def bits(found: Any) -> list[bytes]:
        return [one.boxes_xyxy.tobytes() + one.scores.tobytes() for one in found]

    alone = [bits(detector(pictures)), bits(strict(pictures))]
    assert alone[0] != alone[1] == bits(detector(pictures, confidence=np.float32(0.7)))
    chosen = Detector(folder / "random.pt", **high, classes=[CLASSES[3], 1])
    assert bits(chosen(pictures)) == bits(detector(pictures, confidence=0.7, classes=(3, CLASSES[1]))) != alone[1]
    assert bits(chosen(pictures, classes=CLASSES)) == alone[1]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda n: bits(detector(pictures, confidence=(0.6, 0.7)[n % 2])), range(12)))
    assert together == alone * 6 and bits(detector(pictures)) == alone[0]
    video(tmp_path / "film.avi", 3)
    assert bits(detector(tmp_path / "film.avi", confidence=0.7)) == bits(strict(tmp_path / "film.avi"))
    for wrong in (1.5, -0.1):
        with pytest.raises(ConfigError, match="confidence must be >= 0 and <= 1, got"):
            detector(pictures[0], confidence=wrong)
    with pytest.raises(DataError, match=r"classes holds .*9.*fix: "):
        detector(pictures[0], classes=[9])


def test_a_prediction_is_read_as_arrays_one_by_one_and_drawn(folder, pictures, tmp_path) -> None:
    detector = Detector(folder / "random.pt", **LOW)
    detector._predictor.for_one.register_forward_pre_hook(lambda *_: time.sleep(0.2))
    found = detector(pictures[2])
    assert found.speed["inference"] >= 200 > min(found.speed.values()) > 0 and len(found.speed) == 3
    with pytest.raises(AttributeError, match=r"no attribute speed. fix: call the picture alone"):
        detector(pictures[2:])[0].speed  # noqa: B018 - the attribute raises
    boxes, scores, classes, names = zip(*found, strict=True)
    assert np.array_equal(boxes, found.boxes_xyxy) and np.array_equal(scores, found.scores)
    assert np.array_equal(classes, found.classes) and asdict(detector(pictures[2:])[0])
    assert list(names) == found.class_names == [detector.names[i] for i in classes]
    assert list(scores) == sorted(scores, reverse=True) and (found.boxes_xyxy <= [200, 150, 200, 150]).all()
    same = found.to_supervision()
    assert np.allclose(same.xyxy, found.boxes_xyxy) and same.data["class_name"].tolist() == found.class_names
    assert found.save(tmp_path / "new" / "drawn.png") == tmp_path / "new" / "drawn.png"
    with pytest.raises(TrainError, match=r"cannot write .*drawn\.xyz \(.*extension.* fix: .* another path"):
        found.save(tmp_path / "drawn.xyz")
    with pytest.raises(TrainError, match=r"cannot write .*out .* fix: .*end the name in \.jpg"):
        found.save(tmp_path / "out")
    assert found.xyxy is found.boxes_xyxy
    assert np.allclose(torchvision.ops.box_convert(torch.tensor(found.xyxy), "xyxy", "cxcywh"), found.xywh)
    found.save_crops(tmp_path / "crops")
    with pytest.raises(TrainError, match="is there already"):
        found.save_crops(tmp_path / "crops")
    crops = {path.stem: cv2.imread(str(path)).shape[:2] for path in (tmp_path / "crops").glob("*/*.jpg")}
    crops = [crops[f"{found.path.stem}_{number}"] for number in range(len(found))]
    sides = np.ceil(found.xyxy[:, [3, 2]]) - np.floor(found.xyxy[:, [1, 0]])
    assert np.array_equal(crops, sides) and len(found) > 0
    if schema.is_installed("pandas"):
        assert np.array_equal(found.to_df().iloc[:, :4], found.xyxy) and [*found.to_df()][5:] == ["class", "name"]
    else:
        with pytest.raises(ConfigError, match=r"to_df\(\) needs pandas"):
            found.to_df()
    drawn = cv2.imread(str(tmp_path / "new" / "drawn.png"))
    assert np.array_equal(drawn, found.plot()) and not np.array_equal(drawn, found.image)
    assert found._repr_jpeg_()[:2] == b"\xff\xd8" and "200x150" in repr(found)
    nothing = Detector(folder / "random.pt", confidence=1)(pictures[2])
    assert len(nothing) == 0 and list(nothing) == nothing.to_coco(1) == nothing.class_names == []
    assert nothing.boxes_xyxy.shape == (0, 4) and len(nothing.to_supervision()) == 0
    assert np.array_equal(nothing.plot(), nothing.image) and "nothing" in repr(nothing)


def test_a_prediction_is_shown_where_its_user_looks(folder, pictures, monkeypatch) -> None:
    found = Detector(folder / "random.pt", **LOW)(pictures[2])
    seen: list[Any] = []
    monkeypatch.setattr(ImageShow, "_viewers", [])
    with pytest.raises(TrainError, match=r"has no picture viewer. fix: save"):
        found.show()
    monkeypatch.setattr(ImageShow, "_viewers", [SimpleNamespace(show=lambda image, **_: seen.append(image) or True)])
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: None))  # Python alone
    found.show()
    assert np.array_equal(np.asarray(seen.pop())[..., ::-1], found.plot())
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: SimpleNamespace(kernel="a notebook's"))
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=seen.append))
    found.show()
    assert seen == [found]
    monkeypatch.setitem(sys.modules, "supervision", None)
    with pytest.raises(ConfigError, match=r"needs supervision, .* fix: uv pip install .* supervision$"):
        found.to_supervision()


def test_words_of_ultralytics_work_or_are_answered(folder: Path, pictures: list[Path]) -> None:
    detector = Detector(folder / "random.pt", **LOW)
    found = detector.predict(pictures[2])
    assert list(found) == list(detector(pictures[2])) and len(found) > 0
    with pytest.raises(ConfigError, match=r"conf=0\.5 is not an option here\. fix: confidence=0\.5$"):
        detector(pictures[2], conf=0.5)
    with pytest.raises(ConfigError, match=r"nms_iou=0\.5 comes late\. fix: .* Detector\(\.\.\.\)"):
        detector(pictures[2], nms_iou=0.5)
    with pytest.raises(AttributeError, match=r"no attribute boxes\. fix: \.boxes_xyxy, \.scores and \.classes$"):
        found.boxes  # noqa: B018
    with pytest.raises(TypeError, match=r"fix: leave \[0\] out"):
        found[0]
    with pytest.raises(AttributeError, match=r"no attribute train\. fix: train\(\[\.\.\.\]\)$"):
        detector.train(data="shapes")
    assert not hasattr(detector, "network") and not hasattr(found, "thing")


def test_a_forked_process_is_told_to_make_its_own_detector(folder: Path, pictures: list[Path]) -> None:
    detector = Detector(folder / "random.pt")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            detector(pictures[0])
        except TrainError as error:
            os.write(writer, str(error).encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as answer:
        assert "fix: make it after the fork" in answer.read()
    os.waitpid(child, 0)
    assert len(detector([pictures[0]])) == 1


def test_sources_are_answered_in_one_sentence(folder: Path, pictures: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no checkpoint .*randon.pt"):
        Detector(folder / "randon.pt")
    detector = Detector(folder / "random.pt", on_error="skip")
    video(tmp_path / "film.avi", 1)
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "cut.png").write_bytes(pictures[2].read_bytes()[:-4000])
    for source, message in (
        (str(pictures[0])[:-5] + "9.jpg", "is not a file or folder"),
        (np.zeros((8, 8, 3)), r"an array is float64 \(8, 8, 3\)\. fix: uint8 \(height, width, 3\) in BGR"),
        (
            torch.zeros(3, 8, 8),
            r"^Tensor torch.Size\(\[3, 8, 8\]\) is not a picture. fix: a path, URL, array, Pillow image, list",
        ),
        (Image.new("F", (8, 8)), "mode=F .* cannot be read .*32 bits"),
        (Image.new("La", (8, 8)), "mode=La .* cannot be read"),
        (Image.new("RGB", (8, 8)).crop((3, 3, 3, 6)), r"is uint8 \(3, 0, 3\)"),
        (Image.open(tmp_path / "cut.png"), "PngImageFile .* cannot be read .*fix: "),
        ([0], "0 is not a picture"),
        ([pictures[0], tmp_path / "film.avi"], "film.avi is not a picture"),
        ([pictures[0], tmp_path / "empty.jpg"], "empty.jpg is not an image"),  # a list of another length would mislead
    ):
        with pytest.raises(DataError, match=message):
            detector(source)
