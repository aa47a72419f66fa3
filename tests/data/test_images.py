"""Reading images as they were annotated, and telling what cannot be read."""

import contextlib
import io
import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import PIL.Image
import pytest
from PIL import Image

from data import Annotations, DataError, ImageCache, ImageSource, OnError, build_image_cache, headers, image_cache_name
from data import images as jpeg
from data.headers import TooLargeError, read_header
from data.images import FEW_LEVELS, decode_stored, open_image
from tests.data.bad_inputs import exif
from tests.data.conftest import DAMAGES

needs_simplejpeg = pytest.mark.skipif(find_spec("simplejpeg") is None, reason="needs simplejpeg")


def sample_files() -> dict[str, bytes]:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (45, 70, 3), dtype=np.uint8))
    files = {}
    Image.init()
    for kind in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "PPM", "JPEG2000", "AVIF"):
        if kind not in Image.SAVE:  # Pillow is built without the last two here and there
            continue
        file = io.BytesIO()
        picture.save(file, kind)
        files[kind] = file.getvalue()
    file = io.BytesIO()
    picture.save(file, "WEBP", lossless=True)
    extended = io.BytesIO()
    picture.convert("RGBA").save(extended, "WEBP", quality=50, exif=exif(1))
    big_endian = cv2.imencode(".tif", np.asarray(picture))[1].tobytes()
    return files | {"lossless WEBP": file.getvalue(), "extended WEBP": extended.getvalue(), "OpenCV's TIFF": big_endian}


FILES = sample_files()


@pytest.mark.parametrize("kind", FILES)
def test_headers_give_type_and_size_and_never_fail(kind: str) -> None:
    content = FILES[kind]
    header = read_header(content)
    assert header is not None and (header.width, header.height) == (70, 45)
    assert header.kind.replace(" ", "").upper() in {kind.rsplit(maxsplit=1)[-1], "NETPBM"}
    for end in range(min(len(content), 2000)):
        part = read_header(content[:end])
        assert part is None or (part.kind, part.width, part.height) == (header.kind, 70, 45), end
    generator = np.random.default_rng(0)
    for _ in range(300):
        spoilt = bytearray(content[:400])
        for place in generator.integers(0, len(spoilt), 5):
            spoilt[place] = generator.integers(256)
        with contextlib.suppress(TooLargeError):
            read_header(bytes(spoilt))  # whatever it says, it says it without another error


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "1", "CMYK"])
@pytest.mark.parametrize("kind", ["PNG", "GIF", "BMP", "WEBP", "TIFF", "JPEG2000", "AVIF"])
def test_pixels_are_pillows_whatever_the_mode(kind: str, mode: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(256, size=(24, 40, 4), dtype=np.uint8)
    more = {"lossless": True} if kind == "WEBP" else {"transparency": 3} if mode == "P" and kind != "AVIF" else {}
    picture, path = Image.fromarray(noise, "RGBA"), tmp_path / "picture"
    try:
        (picture.convert("RGB") if mode in ("CMYK", "P") else picture).convert(mode).save(path, kind, **more)
    except (OSError, KeyError, ValueError) as error:
        pytest.skip(f"Pillow does not write it: {error}")
    data, header = open_image(path, "fix: none")
    expected = np.asarray(Image.open(path).convert("RGB"))
    refused = pytest.raises(DataError, match="picture cannot be decoded")
    with refused if (kind, mode) == ("JPEG2000", "CMYK") else contextlib.nullcontext():
        assert np.array_equal(decode_stored(path, data, header, "fix: none"), expected)


@needs_simplejpeg
def test_damage_inside_a_jpeg_is_found() -> None:
    whole = FILES["JPEG"]
    assert jpeg.jpeg_damage(whole) is None and jpeg.jpeg_damage(FILES["PNG"]) is None
    for damaged in (whole[:700] + bytes(300) + whole[1000:], whole[: len(whole) // 2] + whole[-2:]):
        assert cv2.imdecode(np.frombuffer(damaged, np.uint8), 1) is not None, "no other decoder minds"
        assert "Corrupt" in str(jpeg.jpeg_damage(damaged))


def parts_of_a_cache(annotations: Annotations) -> dict[str, slice]:
    table = 8 * (len(annotations) + 1)
    ends = table + 3 * np.cumsum(annotations.sizes.prod(axis=1)).astype(int)
    starts = [table, *ends[:-1]]
    return {"table": slice(0, table)} | {
        f"image {i}": slice(*part) for i, part in enumerate(zip(starts, ends, strict=True))
    }


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_cache_gives_the_images_of_the_files(coco_set, tmp_path, damage, caplog) -> None:
    source, path = coco_set.source(), tmp_path / "cache"
    build_image_cache(source, path, ImageCache.disk)
    content = path.read_bytes()
    for name, part in parts_of_a_cache(source.annotations).items():
        (tmp_path / "part").write_bytes(content[part])
        damage(tmp_path / "part")
        left = (tmp_path / "part").read_bytes() if (tmp_path / "part").exists() else b""
        path.write_bytes(content[: part.start] + left + content[part.stop :])
        for turn in range(2):
            caplog.clear()
            build_image_cache(source, path, ImageCache.disk)
            cached = ImageSource(source.annotations, OnError.stop, path)
            for index in [*range(7), *range(7)]:
                image = cached.read(index)
                assert np.array_equal(image, source.read(index)), name
                assert turn == 0 or name != "table" or not image.flags.writeable, "all processes share its pages"
            if name == "table" or len(left) < part.stop - part.start:
                assert caplog.messages == [f"the image cache {path} is damaged and will be rebuilt"] * (1 - turn)
                assert path.read_bytes() == content and not list(tmp_path.glob(".*"))
            else:
                (message,) = caplog.messages
                image = source.annotations.path(int(name.split()[1]))
                assert message.startswith(f"the image cache {path} is damaged at {image} and perhaps")


def test_a_cache_that_is_cut_while_it_is_read_gives_the_images_of_the_files(coco_set, tmp_path: Path) -> None:
    source, path = coco_set.source(), tmp_path / "cache"
    build_image_cache(source, path, ImageCache.disk)
    cached = ImageSource(source.annotations, OnError.stop, path)
    os.truncate(path, 10)
    assert np.array_equal(cached.read(3), source.read(3))


def test_broken_images_are_not_in_a_cache(coco_set, tmp_path: Path) -> None:
    annotations = coco_set.open()
    (coco_set.root / "images" / "12.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"12.png is not an image"):
        build_image_cache(ImageSource(annotations, OnError.stop), tmp_path / "images", ImageCache.ram)
    assert not list(tmp_path.glob("*images*")), "nothing half-written stays"
    build_image_cache(ImageSource(annotations, OnError.skip), tmp_path / "images", ImageCache.ram)
    cache = ImageSource(annotations, OnError.skip, tmp_path / "images")
    assert [cache.read(index) is None for index in range(7)] == [index == 2 for index in range(7)]


def test_an_unreadable_image_is_named_once(coco_set, caplog: pytest.LogCaptureFixture) -> None:
    (coco_set.root / "images" / "12.png").write_bytes(b"no image")
    source = ImageSource(coco_set.open(), OnError.skip)
    for _ in range(3):
        assert source.read(2) is None and source.read(3) is not None
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "12.png is not an image" in record.getMessage()


@pytest.mark.parametrize(("low", "high"), [(0, 2**12 - 1), (7486, 8032), (7486, 40000)])
def test_few_levels_of_sixteen_bits_are_named(low: int, high: int, coco_set) -> None:
    path = str(coco_set.root / "images" / "12.png")
    shape = cv2.imread(path).shape
    cv2.imwrite(path, np.linspace(low, high, np.prod(shape)).reshape(shape).astype(np.uint16))
    assert coco_set.source().read_sample()[FEW_LEVELS] == [path] * (high < 10_000)


def test_several_frames_are_named(coco_set, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(headers, "MAY_HAVE_FRAMES", ".png")
    path = coco_set.root / "images" / "12.png"
    frame = PIL.Image.open(path).convert("RGB")
    frame.save(path, save_all=True, append_images=[frame.rotate(180)])
    assert coco_set.source().read_sample()[headers.SEVERAL] == [str(path)]


def test_too_little_memory(coco_set, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**30, 2**30, 1000))
    monkeypatch.setattr(ImageSource, "read", None)  # refused before any work
    with pytest.raises(DataError, match=r"data\.cache=ram needs 0\.0 GiB in .* fix: data\.cache=none"):
        build_image_cache(coco_set.source(), tmp_path / "images", ImageCache.ram)
    assert not list(tmp_path.glob("*images*"))


def test_a_kept_cache_belongs_to_these_very_files(coco_set) -> None:
    annotations = coco_set.open()
    name = image_cache_name(annotations, OnError.stop)
    assert image_cache_name(coco_set.open(), OnError.stop) == name != image_cache_name(annotations, OnError.skip)
    path = Path(annotations.path(3))
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # the same pixels, but only reading them would tell
    changed = image_cache_name(annotations, OnError.stop)
    assert changed != name and changed == image_cache_name(annotations, OnError.stop)
    assert image_cache_name(replace(annotations, sizes=annotations.sizes + 1), OnError.stop) != changed
    turned = replace(annotations, turn=annotations.turn._replace(unclear=not annotations.turn.unclear))
    assert image_cache_name(turned, OnError.stop) != changed
