"""Sources name the right files, and frames come as they are stored."""

import logging
import traceback
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import PIL.Image
import pytest

from data import DataError, Exif, Medium, OnBadFile, Resize, media
from tests.file_server import serving_folder


def picture(path: Path, height: int = 30, width: int = 40) -> np.ndarray:
    """A noisy picture, written losslessly where the type is; its RGB pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    assert cv2.imwrite(str(path), image[..., ::-1])
    return image


def video(path: Path, frames: int, size: tuple[int, int] = (64, 48), colour: Any = (0, 0, 0)) -> Path:
    """A video of 10 frames a second, each of one colour (RGB): this one, then 8, 16, ... more."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, size)
    for number in range(frames):
        writer.write(np.full((size[1], size[0], 3), 8 * number + np.array(colour)[::-1], np.uint8))
    writer.release()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    for name in ("b.png", "a.JPG", "deep/at/b.png", "deep/c.bmp", ".hidden/d.png", "deep/.e.png"):
        picture(root / name)
    video(root / "deep" / "clip.avi", 3)
    (root / "notes.md").write_text("no picture")
    (root / "folder.jpg").mkdir()
    return root


EVERYTHING = ["a.JPG", "b.png", "deep/at/b.png", "deep/c.bmp", "deep/clip.avi"]


def test_sources(folder, tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()

    def names(source: str) -> list[str]:
        found = media.find_media(source)
        assert all(medium.path.is_file() and medium.path.is_absolute() for medium in found)
        return [medium.name for medium in found]

    assert names(str(folder)) == EVERYTHING == names("pictures") == names("pictures/../pictures/")
    assert not caplog.messages
    for unknown in ("phone.heic", "deep/at/clip.swf"):
        (folder / unknown).write_bytes(b"")
    for source, unknown in (("pictures", "2 files"), ("pictures/*", "1 files")):
        caplog.clear()
        assert names(source)[:2] == EVERYTHING[:2] and unknown in caplog.text and "phone.heic" in caplog.text
    caplog.clear()
    page = PIL.Image.new("RGB", (9, 9))
    page.save(tmp_path / "pages.tif", save_all=True, append_images=[page])
    assert names("pages.tif") == ["pages.tif"] and "1 images of several" in caplog.text
    assert names("pictures/deep/at/b.png") == ["b.png"]
    assert names("pictures/*.png") == ["b.png"]
    assert names("pictures/deep/**/*") == ["at/b.png", "c.bmp", "clip.avi"]
    assert [medium.is_video for medium in media.find_media("pictures/deep/c*")] == [False, True]
    for source in ("nowhere", "empty", "pictures/*.tif", ""):
        said = "holds no picture or video" if source in ("empty", "pictures/*.tif") else "is not a file or folder"
        with pytest.raises(DataError, match=rf"{said}\. fix:"):
            media.find_media(source)
    (folder / "deep" / "again").symlink_to(folder)
    assert names("pictures") == EVERYTHING, "a link to a folder above"
    (folder / "gone.jpg").symlink_to("nowhere")
    for source in ("pictures", "pictures/*.jpg"):  # reading it says that it is missing
        assert "gone.jpg" in [medium.name for medium in media.find_media(source)]


def test_videos_and_streams_come_frame_by_frame(tmp_path: Path) -> None:
    path = video(tmp_path / "a.avi", 12)
    with serving_folder(tmp_path) as port:
        (stream,) = media.find_media(f"http://me:secret@127.0.0.1:{port}/a.avi?key=secret")
        assert stream.name == f"127-0-0-1-{port}-a-avi" and stream.is_video
        for medium, count in ((Medium(path, "a.avi"), 12), (stream, 0)):
            assert media.count_frames([medium]) == count
            frames = list(media.read_video(medium, []))
            assert [frame.number for frame in frames] == list(range(1, 13)) and frames[0].size == (48, 64)
            assert frames[0].frames_per_second == 10
            assert np.abs([frame.image.mean() - 8 * (frame.number - 1) for frame in frames]).max() < 3
    for channel, colour in enumerate(255 * np.eye(3, dtype=np.uint8)):
        (frame,) = media.read_video(Medium(video(tmp_path / "colour.avi", 1, colour=colour), "colour.avi"), [])
        assert frame.image.mean(axis=(0, 1)).argmax() == channel and np.abs(frame.image.mean((0, 1)) - colour).max() < 9
    (camera,) = media.find_media("87")
    assert (camera.name, camera.address) == ("camera87", "87")
    path.write_bytes(b"no video")
    for medium in (camera, Medium(path, "a.avi"), Medium(video(tmp_path / "none.avi", 0), "none.avi")):
        with pytest.raises(DataError, match=f"{medium.name} holds no frame that OpenCV can read. fix: "):
            list(media.read_video(medium, []))


@pytest.mark.parametrize(
    ("address", "shown", "name"),
    [
        ("http://me:secret@x.org:80/a.JPG?key=secret#top", "http://***@x.org:80/a.JPG", "a.JPG"),
        ("http://x.org/@me/logo@2x.png", "http://x.org/@me/logo@2x.png", "logo@2x.png"),
        ("https://x.org:443/b.webp?mail=a@secret", "https://x.org:443/b.webp", "b.webp"),
        ("rtsp://me:a@secret@x.org/a.jpg?mail=a@secret", "rtsp://***@x.org/a.jpg", "x-org-a-jpg"),
        ("http://me:a/secret@x.org/a.mp4", "http://***@x.org/a.mp4", "x-org-a-mp4"),
        ("rtsp://me:a?secret@x.org:8554/street", "rtsp://***@x.org:8554/street", "x-org-8554-street"),
    ],
)
def test_an_address_is_a_picture_by_its_suffix_and_has_no_password_in_its_names(address, shown, name) -> None:
    (found,) = media.find_media(address)
    assert (found.shown, found.name, found.address) == (shown, name, address)
    assert found.is_video == ("-" in name) and media.count_frames([found]) == 1 - found.is_video


def test_the_address_of_a_picture_in_a_bucket_has_no_secret() -> None:
    with pytest.raises(DataError, match=r"source is an address with a secret, .* fix: ") as refused:
        media.find_media("s3://me:secret@bucket/a.jpg")
    assert "me:secret" not in str(refused.value)


def test_the_address_of_a_picture_is_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = picture(tmp_path / "a b.PNG")
    with serving_folder(tmp_path) as port:
        (found,) = media.find_media(f"http://me:secret@127.0.0.1:{port}/a%20b.PNG?size=1")
        assert np.array_equal(media.read_picture(found, Exif.apply).image, pixels)
        monkeypatch.setattr("data.io.MAX_FETCHED", 2_000)
        with pytest.raises(DataError, match=r"a%20b\.PNG has more than 2,000 bytes\. fix: "):
            media.read_picture(found, Exif.apply)


@pytest.mark.parametrize("name", ["none.png", "none.avi", "empty.png", "empty.avi", "cam%2501.avi", "street"])
def test_an_address_that_shows_nothing_is_named_without_its_password(name, tmp_path, capfd) -> None:
    for suffix in ("png", "avi"):
        (tmp_path / f"empty.{suffix}").touch()
    with serving_folder(tmp_path) as port:
        scheme, number = ("rtsp", 1) if name == "street" else ("http", port)
        for password in ("secret", "sec@ret", "sec/ret"):
            with pytest.raises(DataError, match=rf"^{scheme}://\*\*\*@127\.0\.0\.1:{number}/{name} .*\. fix: ") as said:
                list(batches(f"{scheme}://me:{password}@127.0.0.1:{number}/{name}?key={password}"))
            everything = "".join([*traceback.format_exception(said.value), *capfd.readouterr()])
            assert password not in everything and "ret@" not in everything


def batches(
    source: Path, on_error: OnBadFile = OnBadFile.stop, batch_size: int = 3, **fit: object
) -> media.FrameBatches:
    fitted = media.InputFit(**{"image_size": 64, "stride": 32, "resize": Resize.letterbox, "rect": True} | fit)
    return media.FrameBatches(
        media.find_media(str(source)), fitted, batch_size, exif=Exif.apply, on_error=on_error, threads=2
    )


def test_videos_keep_their_order_among_pictures(folder: Path) -> None:
    video(folder / "b.avi", 10, size=(48, 64))
    frames = batches(folder, batch_size=4)
    seen = [frame for batch in frames for frame in batch.frames]
    for name, count in (("b.avi", 10), ("deep/clip.avi", 3)):
        assert [frame.number for frame in seen if frame.medium.name == name] == list(range(1, count + 1))
    assert len(seen) == 17 == media.count_frames(frames.media) and not frames.skipped


def test_many_shapes_do_not_fill_the_memory(tmp_path: Path) -> None:
    for number in range(30):
        picture(tmp_path / f"{number:02d}.png", 32 + 32 * (number % 10), 32 + 32 * (number % 3))
    sizes = [len(batch.frames) for batch in batches(tmp_path, image_size=640, batch_size=2)]
    assert sum(sizes) == 30 and 1 in sizes[:4]


def test_what_cannot_be_read_stops_or_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "deep" / "clip.avi").write_bytes(b"no video")
    with pytest.raises(DataError, match=r"clip.avi holds no frame"):
        list(batches(folder))
    (folder / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b.png is not an image"):
        list(batches(folder))
    frames = batches(folder, OnBadFile.skip)
    with caplog.at_level(logging.WARNING):
        seen = [frame.medium.name for batch in frames for frame in batch.frames]
    assert sorted(seen) == ["a.JPG", "deep/at/b.png", "deep/c.bmp"] and len(frames.skipped) == 2
    assert caplog.text.count("left out") == 2
