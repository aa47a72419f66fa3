"""Sources name the right files, and frames come as they are stored."""

from __future__ import annotations

import logging
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import cv2
import numpy as np
import pytest
import torch

from data import (
    DataError,
    EvalDataset,
    Exif,
    FrameBatches,
    ImageSource,
    InputFit,
    Medium,
    OnBadFile,
    OnError,
    Request,
    Resize,
    Video,
    find_media,
)
from data.media import read_picture
from data.samplers import input_shape
from data.set_files import IMAGE_SUFFIXES
from tests.data.test_images import with_orientation


def picture(path: Path, height: int = 30, width: int = 40) -> np.ndarray:
    """A noisy picture, written losslessly where the type is; its RGB pixels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = np.random.default_rng(height * width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    assert cv2.imwrite(str(path), image[..., ::-1])
    return image


def video(path: Path, frames: int, codec: str = "MJPG", size: tuple[int, int] = (64, 48)) -> Path:
    """A video of 10 frames a second, each of one grey: 0, 8, 16, ..."""
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*codec), 10, size)
    for number in range(frames):
        writer.write(np.full((size[1], size[0], 3), 8 * number, np.uint8))
    writer.release()
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "pictures"
    for name in ("b.png", "a.JPG", "deep/er/b.png", "deep/c.bmp", ".hidden/d.png", "deep/.e.png"):
        picture(root / name)
    video(root / "deep" / "clip.avi", 3)
    (root / "notes.md").write_text("no picture")
    (root / "folder.jpg").mkdir()
    return root


EVERYTHING = ["a.JPG", "b.png", "deep/c.bmp", "deep/clip.avi", "deep/er/b.png"]


def test_sources(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def names(source: str) -> list[str]:
        media = find_media(source)
        assert all(medium.path.is_file() and medium.path.is_absolute() for medium in media)
        return [medium.name for medium in media]

    assert names(str(folder)) == EVERYTHING == names("pictures") == names("pictures/../pictures/")
    assert names("pictures/deep/er/b.png") == ["b.png"]
    assert names("pictures/*.png") == ["b.png"]
    assert names("pictures/**/*.png") == ["b.png", "deep/er/b.png"]
    assert names("pictures/deep/*/b.*") == ["b.png"]
    Path("list.txt").write_text("pictures/deep/er/b.png\n\n  pictures/deep/c.bmp\npictures/deep/../deep/c.bmp\n")
    assert names("list.txt") == ["c.bmp", "er/b.png"]
    assert [medium.is_video for medium in find_media("pictures/deep/c*")] == [False, True]


def test_a_folder_holds_every_type_that_trains(tmp_path: Path) -> None:
    for suffix in IMAGE_SUFFIXES:
        (tmp_path / f"a{suffix}").touch()
    assert len(find_media(str(tmp_path))) == len(IMAGE_SUFFIXES)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", "source=nowhere: there is no such file or folder"),
        ("empty", "source=empty holds no picture or video"),
        ("pictures/*.tif", "holds no picture or video"),
        ("none.txt", "holds no picture"),
    ],
)
def test_sources_that_hold_nothing(
    source: str, said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("none.txt").write_text("\n")
    with pytest.raises(DataError, match=said.replace(".", r"\.") + ".*"):
        find_media(source)


def test_a_picture_is_read_as_its_tag_and_the_option_say(tmp_path: Path) -> None:
    image = picture(tmp_path / "a.png", 40, 64)
    frame = read_picture(Medium(tmp_path / "a.png", "a.png"), Exif.apply)
    assert np.array_equal(frame.image, image) and frame.size == (40, 64) and frame.number == 1
    (tmp_path / "b.jpg").write_bytes(with_orientation(cv2.imencode(".jpg", image)[1].tobytes(), 6))
    assert read_picture(Medium(tmp_path / "b.jpg", "b.jpg"), Exif.ignore).size == (40, 64)
    assert read_picture(Medium(tmp_path / "b.jpg", "b.jpg"), Exif.apply).size == (64, 40)
    (tmp_path / "c.jpg").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"c.jpg is not an image .* fix: .*on_error=skip"):
        read_picture(Medium(tmp_path / "c.jpg", "c.jpg"), Exif.apply)
    with pytest.raises(DataError, match=r"d.jpg does not exist"):
        read_picture(Medium(tmp_path / "d.jpg", "d.jpg"), Exif.apply)
    for name, said in (("a.png", "cannot be decoded: its PNG data are damaged"), ("b.jpg", "is cut short: the end of")):
        whole = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DataError, match=f"{name} {said}"):
            read_picture(Medium(tmp_path / name, name), Exif.apply)


def test_a_video_s_frames_come_in_order_and_a_cut_one_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = video(tmp_path / "a.avi", 12)
    medium = Medium(path, "a.avi")
    assert Video(medium).num_frames == 12
    frames = list(Video(medium))
    assert [frame.number for frame in frames] == list(range(1, 13)) and frames[0].size == (48, 64)
    assert frames[0].frames_per_second == 10
    assert np.abs([frame.image.mean() - 8 * (frame.number - 1) for frame in frames]).max() < 3
    long = video(tmp_path / "long.avi", 30, size=(320, 240)).read_bytes()
    path.write_bytes(long[: len(long) * 3 // 4])
    with caplog.at_level(logging.WARNING):
        assert 0 < len(list(Video(medium))) < 30
    assert "of 30 frames" in caplog.text
    path.write_bytes(b"no video")
    with pytest.raises(DataError, match=r"a.avi is not a video that OpenCV can read"):
        Video(medium)


def test_streams_are_opened_by_address_and_named_without_secrets(tmp_path: Path) -> None:
    video(tmp_path / "a.avi", 5)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    (medium,) = find_media(f"http://me:secret@127.0.0.1:{server.server_port}/a.avi?key=secret")
    frames = list(Video(medium))
    server.shutdown()
    server.server_close()
    assert medium.name == f"127-0-0-1-{server.server_port}-a-avi" and medium.is_video
    assert [frame.number for frame in frames] == [1, 2, 3, 4, 5] and frames[0].frames_per_second == 10
    (camera,) = find_media("87")
    assert (camera.name, camera.address) == ("camera87", "87")
    with pytest.raises(DataError, match="camera87 cannot be opened"):
        Video(camera)


def batches(media: list[Medium], **changes: object) -> FrameBatches:
    fit = {"image_size": 64, "stride": 32, "resize": Resize.letterbox, "rect": True}
    options = {"batch_size": 3, "exif": Exif.apply, "on_error": OnBadFile.stop, "threads": 2}
    fitted = InputFit(**{key: changes.pop(key, value) for key, value in fit.items()})
    return FrameBatches(media, fitted, **options | changes)


@pytest.mark.parametrize("resize", list(Resize))
def test_a_frame_s_input_is_that_of_an_evaluation_whatever_its_batch(resize: Resize, coco_set) -> None:
    for height, width in ((50, 90), (90, 50), (40, 80), (80, 80), (45, 90), (100, 30)):
        coco_set.add_image(np.full((height, width, 3), height + width, np.uint8), [])
    annotations = coco_set.open()
    dataset = EvalDataset(annotations, ImageSource(annotations, OnError.stop), resize=resize)
    media = find_media(str(coco_set.root / "images"))
    for batch_size in (1, 3, 100):
        seen = []
        for batch in batches(media, batch_size=batch_size, resize=resize):
            assert len(batch.frames) == len(batch.images) == len(batch.letterboxes) <= batch_size
            assert batch.images.is_contiguous(memory_format=torch.channels_last)
            for frame, image, letterbox in zip(batch.frames, batch.images, batch.letterboxes, strict=True):
                index = media.index(frame.medium)
                assert annotations.file_name(index) == frame.medium.name
                height, width = input_shape(frame.size, 64, 32, True, resize=resize)
                expected = dataset[Request(index, height, width, 0)]
                assert expected.images[0].equal(image) and list(letterbox) == expected.letterboxes[0].tolist()
                seen.append(frame.medium.name)
        assert sorted(seen) == sorted(medium.name for medium in media)


def test_videos_keep_their_order_among_pictures(folder: Path) -> None:
    video(folder / "b.avi", 10, size=(48, 64))
    media = find_media(str(folder))
    frames = batches(media, batch_size=4)
    assert frames.count() == 4 + 3 + 10
    seen = [frame for batch in frames for frame in batch.frames]
    for name, count in (("b.avi", 10), ("deep/clip.avi", 3)):
        assert [frame.number for frame in seen if frame.medium.name == name] == list(range(1, count + 1))
    assert len(seen) == 17 and not frames.skipped


def test_many_shapes_do_not_fill_the_memory(tmp_path: Path) -> None:
    """Pictures that wait for others of their shape are at most a few batches."""
    for number in range(30):
        picture(tmp_path / f"{number:02d}.png", 32 + 32 * (number % 10), 32)
    taken: list[int] = []
    for batch in batches(find_media(str(tmp_path)), image_size=640, batch_size=2, threads=1):
        taken.append(len(batch.frames))
    assert sum(taken) == 30 and 1 in taken


def test_what_cannot_be_read_stops_or_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "b.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"b.png is not an image"):
        list(batches(find_media(str(folder))))
    (folder / "deep" / "clip.avi").write_bytes(b"no video")
    media = find_media(str(folder))
    with pytest.raises(DataError, match=r"clip.avi is not a video"):
        batches(media).count()
    frames = batches(media, on_error=OnBadFile.skip)
    assert frames.count() == 4
    seen = [frame.medium.name for batch in frames for frame in batch.frames]
    assert sorted(seen) == ["a.JPG", "deep/c.bmp", "deep/er/b.png"] and len(frames.skipped) == 2
    assert caplog.text.count("left out") == 2
