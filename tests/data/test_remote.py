"""Pictures in a bucket, on a web server and in tar files: the same as on a disk, or a sentence."""

import io
import random
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import data
from data import Annotations, DataError, ImageSource, OnError, SplitConfig, TrainDataset, open_annotations, remote
from tests.data.conftest import EVERY_AUGMENT, CocoSet, sampler_of
from tests.data.sets import YoloSet
from tests.file_server import SECRET, Bucket, serving_bucket

COUNT = 12


@pytest.fixture
def picture_set(empty_set: CocoSet) -> CocoSet:
    """Noisy pictures with a box each, one of them with a name that has to be quoted."""
    generator = np.random.default_rng(0)
    for _ in range(COUNT):
        size = (*generator.integers(40, 90, 2).tolist(), 3)
        empty_set.add_image(generator.integers(0, 256, size, dtype=np.uint8), [(1, [1.0, 2.0, 20.0, 16.0])])
    folder = empty_set.root / "images"
    (folder / "11.png").rename(folder / "ä b#1%2B&.png")
    empty_set.json["images"][1]["file_name"] = "ä b#1%2B&.png"
    names = [record["file_name"] for record in empty_set.json["images"]]
    for number, (part, inside) in enumerate(((names[:5], "./train"), (names[5:], "."))):
        with tarfile.open(folder / f"t-{number}.tar", "w") as file:
            for name in part:
                file.add(folder / name, f"{inside}/{name}")
    return empty_set


@pytest.fixture
def bucket(picture_set: CocoSet, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 1.0)
    monkeypatch.setattr(remote, "TIMEOUT_SECONDS", 1.0)
    remote._store.cache_clear()
    with serving_bucket(picture_set.root) as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it may have started in another environment
        yield running
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    remote._store.cache_clear()


def opened(picture_set: CocoSet, images: str, **changes: object) -> Annotations:
    picture_set.save()
    config = replace(picture_set.config, train=SplitConfig("instances.json", images), **changes)
    return open_annotations(config, "train")


def batches(annotations: Annotations, workers: int = 0) -> list[tuple[Tensor, Tensor]]:
    source = ImageSource(annotations, OnError.stop)
    dataset = TrainDataset(annotations, source, EVERY_AUGMENT, seed=1, epochs=2)
    loader = data.make_loader(dataset, sampler_of(COUNT, 4), workers)
    return [(batch.images.clone(), batch.targets.clone()) for _ in range(2) for batch in loader]


def two_percent(seed: int, *faults: str) -> Callable[[str, int], str | None]:
    """One of the faults in two requests of a hundred, and in the third request in any case."""
    generator = random.Random(seed)
    return lambda _, number: generator.choice(faults) if number == 3 or generator.random() < 0.02 else None


PLACES = ("s3://b/images", "s3://b/images/t-*.tar", "{url}/images", "{url}/images/t-{{0..1}}.tar", "images/t-*.tar")


@pytest.mark.release
@pytest.mark.parametrize("images", PLACES)
def test_batches_are_those_from_the_disk_despite_faults(images: str, picture_set: CocoSet, bucket: Bucket) -> None:
    expected = batches(opened(picture_set, "images"))
    bucket.fault = two_percent(0, "503", "slow", "cut", "reset")
    annotations = opened(picture_set, images.format(url=bucket.url))
    assert {".tar@" in annotations.path(index) for index in range(COUNT)} == {".tar" in images}
    found = batches(annotations, workers=2 if images == PLACES[0] else 0)
    assert len(expected) == len(found) == 6
    assert all(
        torch.equal(a, b) for one, other in zip(expected, found, strict=True) for a, b in zip(one, other, strict=True)
    )
    assert annotations.digest() == opened(picture_set, "images").digest()
    sizes = [path.stat().st_size for path in (picture_set.root / "images").glob("*.png")]
    assert annotations.num_bytes == sum(sizes)
    assert bool(bucket.authorised) == images.startswith("s3")


def test_images_at_an_address_are_fetched_once_each_and_ahead_of_need(picture_set: CocoSet, bucket: Bucket) -> None:
    source = ImageSource(opened(picture_set, "s3://b/images"), OnError.stop)
    bucket.asked.clear()
    source.begin(range(COUNT))
    assert all(source.read(index) is not None for index in range(COUNT)) and len(bucket.asked) == COUNT
    source.begin([])  # what was begun and is not needed is forgotten
    source.read(0)
    assert len(bucket.asked) == COUNT + 1


@pytest.mark.parametrize("images", PLACES)
@pytest.mark.parametrize("many", [False, True])
def test_pictures_that_the_json_names_and_the_bucket_lacks_are_named(
    images: str, many: bool, picture_set: CocoSet, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "FEW", 4 if many else 1000)  # then a bucket is listed, in pages
    picture_set.json["images"].append(picture_set.json["images"][0] | {"id": 99, "file_name": "./10.png"})  # again
    picture_set.add_image(np.zeros((50, 50, 3), dtype=np.uint8), [(1, [1.0, 2.0, 20.0, 16.0])])
    lost = picture_set.root / "images" / picture_set.json["images"][-1]["file_name"]
    content = lost.read_bytes()
    lost.unlink()
    place = images.format(url=bucket.url)
    with pytest.raises(DataError, match=rf"{lost.name} is not in .*images\. fix: "):
        opened(picture_set, place)
    left = opened(picture_set, place, on_error=OnError.skip)
    assert len(left) == COUNT + 1 and any("missing image files (1)" in line for line in left.skipped)
    if not images.endswith(".tar"):
        lost.write_bytes(content)
        assert len(opened(picture_set, place, on_error=OnError.skip)) == COUNT + 2  # it arrived
    with pytest.raises(DataError, match=r"nothing.*fix: "):
        opened(picture_set, place.replace("images", "nothing"))


FAULTS = {"gone": "there is no such object", "503": "HTTP status 503", "denied": "access denied", "silent": "a try may",
          "cut": "a try may", "reset": "a try may"}  # fmt: skip


@pytest.mark.parametrize("on_error", [OnError.stop, OnError.skip])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_that_stays_is_a_sentence_and_only_a_picture_that_is_gone_is_left_out(
    fault: str, on_error: OnError, picture_set: CocoSet, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    annotations = opened(picture_set, "s3://b/images")
    source = ImageSource(annotations, on_error)
    bucket.fault = lambda key, _: fault if key.endswith("/13.png") else None
    source.begin(range(COUNT))
    said = rf"s3://b/images/13\.png cannot be .*{FAULTS[fault]}.* fix: "
    if fault == "gone" and on_error == OnError.skip:
        assert source.read(3) is None and source.take_left_out().tolist() == [3]
        assert "s3://b/images/13.png" in caplog.text
    else:
        with pytest.raises(DataError, match=said) as caught:
            source.read(3)
        assert SECRET not in str(caught.value) and "do not show me" not in str(caught.value)
        assert not len(source.take_left_out())
    assert source.read(4) is not None


def test_a_tar_that_changes_is_read_again_and_one_that_ends_early_is_named(picture_set, bucket) -> None:
    before = opened(picture_set, "s3://b/images/t-*.tar")
    tar = picture_set.root / "images" / "t-1.tar"
    content = tar.read_bytes()
    padded = io.BytesIO()
    with tarfile.open(fileobj=padded, mode="w") as file:
        file.addfile(tarfile.TarInfo("first.txt"))
    tar.write_bytes(padded.getvalue()[:512] + content)
    after = opened(picture_set, "s3://b/images/t-*.tar")
    assert before.path(COUNT - 1) != after.path(COUNT - 1)
    last = ImageSource(after, OnError.stop).read(COUNT - 1)
    tar.write_bytes(content)
    np.testing.assert_array_equal(last, ImageSource(before, OnError.stop).read(COUNT - 1))
    tar.write_bytes(content[: len(content) // 3])
    with pytest.raises(DataError, match=r"t-1\.tar@.* cannot be .* fix: "):
        ImageSource(before, OnError.stop).read(COUNT - 1)
    with pytest.raises(DataError, match=r"t-1\.tar is not a whole, uncompressed tar"):
        opened(picture_set, "s3://b/images/t-*.tar")


def test_a_file_in_parts_is_read_like_any_other(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(random.Random(0).randbytes(200_000))
    parts = io.BufferedReader(remote._Parts(str(path), 200_000), remote.BLOCK)
    with path.open("rb") as file:
        for offset, whence in ((9, 0), (70_000, 1), (-50, 1), (-1000, 2), (3, 0), (1, 1)):
            assert parts.seek(offset, whence) == file.seek(offset, whence) == parts.tell()
            assert parts.read(1000) == file.read(1000)
    raw = remote._Parts(str(path), 200_000)
    assert [raw.seek(5), raw.seek(7, 1), raw.seek(-5, 2)] == [5, 12, 199_995]


def test_a_name_stands_for_the_one_picture_of_a_tar_that_it_can_mean(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "t.tar", "w") as file:
        for name in ("cam1/1.png", "new/2.png", "old/2.png", "3.png", "set/4.png", "LICENSE", "LICENSE"):
            info = tarfile.TarInfo(name)
            info.type = tarfile.SYMTYPE if name == "new/2.png" else tarfile.REGTYPE
            info.pax_headers = {"GNU.sparse.map": "0,0", "GNU.sparse.size": "9"} if name == "3.png" else {}
            file.addfile(info)
    names = ["cam1/1.png", "cam2/1.png", "new/2.png", "3.png", "4.png"]
    places = remote.in_shards(names, str(tmp_path / "t.tar"))
    assert [place for place, name in zip(places, names, strict=True) if place == name] == names[1:4]
    with pytest.raises(DataError, match=r"twice.* fix: "):
        remote.in_shards(["LICENSE"], str(tmp_path / "t.tar"))


def test_a_folder_keeps_a_share_of_the_files_and_trusts_no_damaged_or_older_one(picture_set, bucket, tmp_path) -> None:
    paths = [f"s3://b/images/{record['file_name']}" for record in picture_set.json["images"]]
    fetched = [remote.Fetcher(tmp_path, 1.0).read(path) for path in paths]
    bucket.asked.clear()
    assert [remote.Fetcher(tmp_path, 1.0).read(path) for path in paths] == fetched
    assert sorted(bucket.asked) == sorted(path.removeprefix("s3://b/") for path in paths)  # whether they changed
    bucket.asked.clear()
    kept = sorted(tmp_path.iterdir())
    kept[0].write_bytes(kept[0].read_bytes()[:-1])
    kept[1].write_bytes(b"")
    assert [remote.Fetcher(tmp_path, 1.0).read(path) for path in paths] == fetched and len(bucket.asked) == COUNT + 2
    (some := tmp_path / "some").mkdir()
    assert [remote.Fetcher(some, 0.5).read(path) for path in paths] == fetched
    assert 0 < len(list(some.iterdir())) < COUNT
    assert remote.Fetcher(tmp_path / "no such folder", 1.0).read(paths[0]) == fetched[0]
    (bucket.folder / "images" / Path(paths[0]).name).write_bytes(b"another picture")
    assert remote.Fetcher(tmp_path, 1.0).read(paths[0]) == b"another picture"


def test_label_files_go_with_a_list_of_pictures_at_an_address(yolo_set: YoloSet) -> None:
    root = yolo_set.root
    yolo_set.add("images/train", "labels/train")
    local = yolo_set.open("images/train")
    paths = [Path(local.path(index)).relative_to(root) for index in range(len(local))]
    (root / "list.txt").write_text("".join(f"./{path}\n" for path in paths))
    (root.parent / "away").mkdir()
    (root / "images").rename(root.parent / "away" / "images")
    with serving_bucket(root.parent / "away") as running:
        away = yolo_set.open("list.txt", running.url)
        assert away.digest() == local.digest() and away.path(0) == f"{running.url}/{paths[0]}"
        with pytest.raises(DataError, match=r"data\.train\.images: .*list.* fix: "):
            yolo_set.open(".", running.url)


@pytest.mark.parametrize(
    "images",
    [f"https://me:{SECRET}@host/a", f"https://host/a?sig={SECRET}", f"s3://{SECRET}@b/a", "ftp://host/a", "s3:///a"],
)
def test_an_address_with_a_password_or_of_another_kind_is_refused_without_showing_it(images, coco_set) -> None:
    with pytest.raises(ValueError, match=r"data\.train\.images is .* fix: ") as caught:
        opened(coco_set, images)
    assert SECRET not in str(caught.value)
