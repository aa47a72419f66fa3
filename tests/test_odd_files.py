"""Guards what odd files of others become: a sentence, a note or a problem, none unsaid."""

import contextlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch

from conf import ConfigError
from conf.cli.command_line import AT_HOME
from conf.cli.program import options_of
from data import io, layouts, media, recognise
from data.errors import DataError
from data.index import read_annotations
from data.io import OF_SYSTEM
from data.media import find_media
from models import ModelError
from models.cfg import load_cfg
from models.darknet import Darknet
from models.weights import other_layer
from train_utils.inference import open_checkpoint
from train_utils.inference.open_checkpoint import ExportedNetwork

PLAIN = "0 0.5 0.5 0.2 0.2\n"


def picture(path: Path, value: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(path), np.full((32, 32, 3), value, np.uint8))
    return path


@pytest.mark.parametrize(
    ("second", "text", "is_problem"),
    [
        ("images/a.txt", "1 0.5 0.5 0.2 0.2\n", True),
        ("images/a.txt", "", True),
        ("labels/a.TXT", "1 0.5 0.5 0.2 0.2\n", True),
        ("images/a.txt", " 0  0.50 0.5 0.2 0.2", False),  # the same box
        ("images/a.txt", "a caption of the picture", False),
    ],
)
def test_two_label_files_of_one_image(second: str, text: str, is_problem: bool, tmp_path: Path) -> None:
    for name, content in {"labels/a.txt": PLAIN, second: text}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    (tmp_path / "data.yaml").write_text("train: images\nval: images\nnames: [x, y]\n")
    picture(tmp_path / "images" / "a.jpg")
    config = options_of("check_data", [f"data={tmp_path}/data.yaml", f"data.index_dir={tmp_path}/index"]).data
    findings = read_annotations(config, "train")[1]
    assert bool(findings.counts) is is_problem
    if is_problem:
        assert all(str(tmp_path / name) in findings.first()[0] for name in ("labels/a.txt", second))


@pytest.mark.parametrize(
    "name",
    [
        "@eaDir/a.jpg/x.jpg",
        "#recycle/b.jpg",
        "$RECYCLE.BIN/b.jpg",
        "Thumbnails/a.jpg",
        "a (conflicted copy 1).jpg",
        "a_conflict-20240101-120000.jpg",
    ],
)
def test_what_systems_make_is_left_out_and_named(name: str, tmp_path: Path, caplog) -> None:
    kept = picture(tmp_path / "a.jpg")
    picture(tmp_path / name)
    left_out = list[str]()
    assert io.files_below(tmp_path, {".jpg"}, left_out) == [str(kept)]
    assert left_out == [str(tmp_path / name.partition("/")[0])]
    assert [medium.path for medium in find_media(str(tmp_path))] == [kept]
    assert OF_SYSTEM in caplog.text
    if "Thumb" not in name:
        assert [medium.path for medium in find_media(f"{tmp_path}/**/*.jpg")] == [kept]


def test_what_only_looks_like_a_copy_is_kept(tmp_path: Path) -> None:
    kept = [str(picture(tmp_path / name)) for name in ("a.jpg", "near_conflict.jpg", "original/b.jpg")]
    for folder in (tmp_path, tmp_path / "original"):
        (folder / ".DS_Store").touch()
    left_out = list[str]()
    assert (io.files_below(tmp_path, {".jpg"}, left_out), left_out) == (kept, [])


def test_a_pattern_from_the_first_folder_on_and_brackets_of_one_that_is_there(tmp_path: Path) -> None:
    path, inside = str(picture(tmp_path / "a.jpg")), picture(tmp_path / "set [1]" / "a.jpg")
    assert [medium.path for medium in find_media(f"/[{path[1]}]{path[2:]}")] == [Path(path)]
    assert [medium.path for medium in find_media(f"{inside.parent}/*.jpg")] == [inside]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "gbk", "shift-jis", "utf-16-le"])
@pytest.mark.parametrize("name", ["classes.txt", "data.yaml"])
def test_encodings_are_read_or_refused(encoding: str, name: str, tmp_path: Path) -> None:
    text = "人\n犬\n" if name == "classes.txt" else "names: [人, 犬]\n"
    (tmp_path / name).write_bytes(text.encode(encoding, "replace"))
    if encoding in ("utf-8", "utf-8-sig", "utf-16"):
        assert layouts.read_names(tmp_path / name)[0] == ["人", "犬"]
    else:
        with pytest.raises(DataError, match="fix: save it as UTF-8"):
            layouts.read_names(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"shapes": [], "imagePath": "a.jpg"}', "labelme"),
        ("a.json", '[{"annotations": [{"coordinates": {"x": 1}}]}]', "CreateML"),
        ("a.xml", "<annotations><image/></annotations>", "CVAT"),
        ("a.jsonl", "{}", "Hugging Face"),
        ("a.csv", "a,b", "csv"),
        ("a.zip", "PK", "unzip"),
        ("label_2/a.txt", "Car 0.0 0 -1.5 587.0 173.3 614.1 200.1 1.6 1.6 3.6 -0.6 1.7 46.7 -1.5\n", "KITTI"),
    ],
)
def test_other_formats_are_named(name: str, text: str, said: str, tmp_path: Path) -> None:
    picture(tmp_path / "image_2" / "a.jpg")
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    for place in (tmp_path, tmp_path / name):
        with pytest.raises(DataError, match=said):
            recognise.recognise(place)


def test_what_would_hang_ends_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "instances.json")
    assert not recognise.is_coco(tmp_path / "instances.json") and not [
        *recognise.file_names_in(tmp_path / "instances.json")
    ]
    names = ",".join(f"n{number}" for number in range(layouts.MOST_VALUES))
    (tmp_path / "data.yaml").write_text(f"names: [{names}]")
    with pytest.raises(DataError, match="more than"):
        layouts.load_yaml(tmp_path / "data.yaml")
    with pytest.raises(DataError, match="there is no such place"):
        layouts.find_place("a/" * 20_000, tmp_path / "data.yaml", [tmp_path])


CFG = "[net]\nwidth=64\nheight=64\nchannels=3\n[convolutional]\nfilters=8\nsize=3\nstride=2\npad=1\nactivation=leaky\n"
CFG += "[maxpool]\nsize=3\nstride=1\n[convolutional]\nfilters=18\nsize=1\nactivation=linear\n[yolo]\nmask=0,1,2\n"
CFG += "anchors=1,2,3,4,5,6\nnum=3\nclasses=1\n"


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("leaky", "relu", "activation=leaky"),
        ("size=3\nstride=1", "size=5\nstride=1", "size=3"),
        ("pad=1\n", "pad=1\ndilation=2\n", "layer 0, [convolutional]"),
        ("width=64", "bn_eps=0.001\nwidth=64", ""),  # the variances follow it
        ("activation=linear", "activation = linear # the same", ""),
    ],
)
def test_layers_that_compute_something_else(old: str, new: str, said: str, tmp_path: Path) -> None:
    networks = []
    for number, text in enumerate((CFG, CFG.replace(old, new))):
        (tmp_path / f"{number}.cfg").write_text(text)
        networks.append(Darknet(load_cfg(tmp_path / f"{number}.cfg")))
    sentence = other_layer(networks[1], networks[0])
    assert said in sentence and bool(sentence) == bool(said)


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("run_dir=~/x y", "run_dir=HOME/x y"),
        ('run_dir="~/x"', 'run_dir="HOME/x"'),
        ("plugins=[~/x.py,~/y.py]", "plugins=[HOME/x.py,HOME/y.py]"),
        ("~/set", "HOME/set"),
        ("~data", "~data"),
        ("source=http://a/~b", "source=http://a/~b"),
    ],
)
def test_home_folder_on_a_command_line(word: str, read: str) -> None:
    assert AT_HOME.sub("HOME", word) == read


def test_home_folder_in_options(monkeypatch) -> None:
    config = options_of("train", ["data=shapes", "run_dir=~/x", 'data.root="~/y"'])
    assert (config.run_dir, config.data.root) == (f"{Path.home()}/x", f"{Path.home()}/y")
    monkeypatch.setattr("os.path.expanduser", str)  # as for a user of a container that no table lists
    for option in ("run_dir=~/x", 'data.root="~/y"'):
        with pytest.raises(ConfigError, match=r"~.*: this user has no home folder"):
            options_of("train", ["data=shapes", option])


BOXES, SCORES = torch.ones(1, 9, 4), torch.full((1, 9, 2), 0.5)


@pytest.mark.parametrize(
    ("outputs", "is_right"),
    [
        ((BOXES, SCORES), True),
        ((BOXES, SCORES[..., 0], torch.ones(1, 9)), True),
        ((BOXES * torch.nan, SCORES), False),
        ((BOXES, SCORES * 3), False),
        ((BOXES, SCORES[:, :7]), False),
        ((BOXES, SCORES[..., :1]), False),
        ((BOXES, SCORES[..., 0], torch.full((1, 9), 99)), False),
    ],
)
def test_outputs_of_exported_files(outputs: tuple[torch.Tensor, ...], is_right: bool) -> None:
    network = ExportedNetwork.__new__(ExportedNetwork)
    torch.nn.Module.__init__(network)
    network.num_classes, network.batch_size, network.path = 2, None, Path("a.onnx")
    network.run = lambda _: outputs
    images = torch.zeros(1, 3, 64, 64)
    if is_right:
        assert [tuple(one.shape) for one in network(images)] == [(1, 9, 4), (1, 9, 2)]
    else:
        with pytest.raises(ModelError, match=r"a\.onnx cannot be read"):
            network(images)


@pytest.mark.parametrize(
    "change", [{}, {"image_size": [64]}, {"stride": 0}, {"batch_size": 2**16}, {"names": []}, {"category_ids": [1]}]
)
def test_facts_of_exported_files(change: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"names": ["a", "b"], "category_ids": [1, 2], "image_size": [64, 64], "stride": 32, "open": []} | change
    texts = {key: json.dumps(value) for key, value in facts.items()}
    monkeypatch.setattr(open_checkpoint, "read_metadata", lambda _: texts)
    with pytest.raises(ModelError, match="do not fit") if change else contextlib.nullcontext():
        open_checkpoint.read_facts(Path("a.onnx"))


def test_a_pipe_is_no_exported_file_and_no_video(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.onnx")
    with pytest.raises(ModelError, match="not a regular file"):
        open_checkpoint.read_facts(tmp_path / "a.onnx")
    os.mkfifo(tmp_path / "a.mp4")
    with pytest.raises(DataError, match="holds no frame"):
        next(media.read_video(media.Medium.at(str(tmp_path / "a.mp4"), "a.mp4"), []))


@pytest.mark.parametrize(
    ("frames", "again", "is_read"),
    [([0, 0, 7], [0, 0, 7], True), ([7], [7], True), ([0, 0], [0, 0], False), ([7, 7], [8, 8], False)],
)
def test_frames_that_nothing_fills(frames: list[int], again: list[int], is_read: bool, monkeypatch) -> None:
    captures = [
        SimpleNamespace(read=zip([True] * 9, [*map(np.array, values), *[None] * 4], strict=False).__next__)
        for values in (frames, again)
    ]
    monkeypatch.setattr(media, "_capture", lambda _: captures.pop(0))
    with contextlib.nullcontext() if is_read else pytest.raises(DataError, match="interlaced"):
        media._check_filled(media.Medium.at("film.avi", "film.avi"))
