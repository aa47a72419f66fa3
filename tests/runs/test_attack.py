"""Hostile files and options: each program takes them or refuses them in one sentence.

A case damages one file of a tiny set, network or run, or gives one option an extreme value, and
starts a program in a process of its own. It holds if the program succeeds, or ends with exit code 2
and one sentence. A traceback, a crash, a hang, memory without bounds and files outside its folder
are failures. Most cases failed once, when all damages of all files were tried.
"""

import json
import os
import random
import re
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.runs.process_group import fork_context, write_to

SECONDS = 60.0  # that a case may take: a healthy one takes about one, and the machine is shared
MEMORY = 7 << 30  # bytes of address space: torch maps several by itself

# Where a case starts. The programs' working folder is work/ in it.
DATA = ["data.root=set", "data.index_dir=index", "data.workers=0"]
COCO = [
    "data=coco", *DATA, "data.train={annotations: train.json, images: images/train}",
    "data.val={annotations: val.json, images: images/val}",
]  # fmt: skip
YOLO, OBJ = ["data=set/data.yaml", *DATA[1:]], ["data=set/obj.data", *DATA[1:]]
VOC = [
    "data=voc", *DATA, "data.names=[cat,dog]", "data.train={annotations: list.txt, images: voc}",
    "data.val={annotations: voc/Annotations, images: voc}",
]  # fmt: skip
LIST = ["data=yolo", *DATA, "data.names=names.txt", "data.train.annotations=images.txt", "data.val.annotations=images"]
CFG, WEIGHTS = ["model.cfg=small.cfg"], ["model.cfg=small.cfg", "model.weights=small.weights"]
TINY = [
    *CFG, "train.image_size=32", "train.batch_size=3", "train.epochs=1", "device=cpu", "logger.pictures=false",
    "augment.mosaic=0.5", "evaluate.batch_size=3",
]  # fmt: skip
TRAIN = ["train", *TINY, "run_dir=out"]
CHECK = ["check_data", *CFG, "image_size=32", "pictures=2", "out=out"]
EVAL = ["eval", "device=cpu", *DATA, "evaluate.image_size=32", "out=out"]
PREDICT = ["predict", "device=cpu", "image_size=32", "source=set/images/val", "out=out", "confidence=0.01"]
EXPORT = ["export", "format=torch", "out=out/x.pt2", "image_size=32"]
TO_DARKNET = ["convert", "out=out.weights"]
ANCHORS = ["anchors", *CFG, "image_size=32", "rounds=1"]
RESUME = ["train", "resume=run", "train.epochs=2", *DATA]
COMPARE = ["compare", "run", "run2", "resamples=10"]
CKPT = "ckpt=run/checkpoints/best.pt"

# Values in place of one of a text: wrong types, numbers without bounds, references, code.
WORDS = [
    "null", "-1", "0", "NaN", "nan", "inf", "-Infinity", "1e400", "1e30", "9" * 30, "9" * 5000, "1.5", '""', '"x"',
    "[]", "{}", "[1]", '{"a": 1}', "true", "", "${oc.env:HOME}", "!!python/object/apply:os.system [touch ../escaped]",
    "../escaped", "/dev/zero", '"caf\\ud8ff"', "\u202e\U0001f600", "&a [*a]", "2001-13-45", "1:2:3", "0x10", "#",
]  # fmt: skip


def text_damage(replace: Callable[[str, random.Random], str]) -> Callable[[bytes, random.Random], bytes]:
    return lambda old, draw: replace(old.decode("utf-8", "surrogateescape"), draw).encode("utf-8", "surrogateescape")


def other_word(text: str, draw: random.Random) -> str:
    words = list(re.finditer(r'"[^"\n]*"|-?[\w.]+|\S', text)) or [re.match("", text)]
    word: Any = draw.choice(words)
    return text[: word.start()] + draw.choice(WORDS) + text[word.end() :]


def other_line(text: str, draw: random.Random) -> str:
    """The text with one line left out, twice, or a thousand times."""
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    return "".join([*lines[:at], *lines[at : at + 1] * draw.choice([0, 2, 1000]), *lines[at + 1 :]])


def flipped(old: bytes, draw: random.Random) -> bytes:
    new = bytearray(old or b"x")
    for _ in range(draw.randint(1, 4)):
        new[draw.randrange(len(new))] ^= 1 << draw.randrange(8)
    return bytes(new)


PICKLE = b"\x80\4cos\nsystem\n(S'touch ../escaped'\ntR."
DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "empty": lambda old, draw: b"",
    "cut": lambda old, draw: old[: draw.randrange(len(old) + 1)],
    "head and noise": lambda old, draw: old[:16] + draw.randbytes(max(0, len(old) - 16)),
    "flipped": flipped,
    "zeros": lambda old, draw: bytes(len(old)),
    "long": lambda old, draw: old + draw.choice([b"\0", b"x", b"9", b"\n", b" ", b"0.5 "]) * 3_000_000,
    "deep": lambda old, draw: draw.choice([b"[", b'{"a":', b"<a>", b"- ", b"(", b"{a: "]) * 100_000,
    "not UTF-8": lambda old, draw: old[: (at := draw.randrange(len(old) + 1))] + b"\xff\xe9\xa0" + old[at:],
    "a NUL": lambda old, draw: old[: (at := draw.randrange(len(old) + 1))] + b"\0" + old[at:],
    "a word": text_damage(other_word),
    "two words": text_damage(lambda text, draw: other_word(other_word(text, draw), draw)),
    "a line": text_damage(other_line),
    "other kind": lambda old, draw: draw.choice(
        [b"\x89PNG\r\n\x1a\n", b"PK\3\4", b"\xff\xd8\xff", b"[]", b"{}", PICKLE]
    ),
}
PLACES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
}


HUGE = "9" * 20
FILES = [  # a file, its damage, and a program that reads it
    ("set/images/train/1.jpg", "flipped", [*TRAIN, *VOC, "data.cache=disk"]),
    ("set/images/val/1.png", "an endless device", [*PREDICT, CKPT, "on_error=skip"]),
    ("set/train.json", "two words", [*CHECK, "data=set/train.json"]), ("set/val.json", "cut", [*EVAL, CKPT]),
    ("set/labels/train/1.txt", "deep", [*TRAIN, *YOLO]), ("set/data.yaml", "deep:1", [*CHECK, "data=set"]),
    ("set/names.txt", "a pipe", [*CHECK, *OBJ]),
    ("set/names.txt", "not UTF-8", [*CHECK, *OBJ]), ("set/images.txt", "a line", [*CHECK, *LIST]),
    ("set/voc/Annotations/1.xml", "missing", [*CHECK, "data=set/voc"]),
    ("set/voc/Annotations/1.xml", "a pipe", [*CHECK, "data=set/voc"]),
    ("small.cfg", "two words", [*EXPORT, *WEIGHTS]), ("small.weights", "head and noise", [*PREDICT, *WEIGHTS]),
    ("run/checkpoints/best.pt", "other kind", [*TO_DARKNET, CKPT]), ("run/checkpoints/last.pt", "zeros", RESUME),
    ("run/config.yaml", "deep", COMPARE), ("run/config.yaml", "not UTF-8", COMPARE),
    ("run/config.yaml", "other kind", COMPARE), ("run/best_detections.npz", "empty", COMPARE),
    ("run/metrics.csv", "a folder", RESUME), ("run/metrics.csv", "not UTF-8", RESUME),
    ("run/steps.csv", "a NUL", RESUME), ("run/train.log", "a pipe", RESUME),
    ("mine.yaml", "not UTF-8", [*TRAIN, *COCO, "experiment=mine.yaml"]),
    ("mine.yaml", "two words", [*TRAIN, *COCO, "experiment=mine.yaml"]),
    ("own/model/mine.yaml", "deep:1", [*CHECK, *COCO, "--config-dir", "own", "model=mine"]),
    ("mine_data.yaml", "deep", [*CHECK, "data=mine_data.yaml"]),
    ("results.json", "deep", ["eval", *COCO, "detections=results.json"]),
    ("video.avi", "long", [*PREDICT, CKPT, "source=video.avi"]),
    ("index/*.images", "a pipe", [*TRAIN, *COCO, "data.cache=disk"]), ("index/*/*", "a pipe", [*EVAL, CKPT]),
]  # fmt: skip
OPTIONS = [
    *([*TRAIN, *COCO, option] for option in ("data.shapes={a: 1}", "optim=nan", "optim.lr=1e39")),
    *([*TRAIN, *COCO, f"{key}={HUGE}"] for key in ("devices", "loss.positives", "train.seed")),
    [*EVAL, CKPT, "evaluate.image_size=???"], [*CHECK, *COCO, "model=[[1]]"], ["predict", "source=.", "plugins=[[1]]"],
    *([*TO_DARKNET, CKPT, option] for option in ("cfg=../..", "out=''", "out=../..")), ANCHORS,
]  # fmt: skip


def prepare() -> None:
    """Write the sets, the network and the small files that cases damage, here."""
    import cv2

    from data import DataFormat
    from models import Darknet, parse_cfg, save_darknet_weights
    from tests.data.bad_inputs import voc_text
    from tests.data.drawn_set import DrawnSet
    from tests.data.test_media import video
    from tests.models.small_network import cfg_text

    drawn = DrawnSet(Path("set"))
    cv2.imwrite("set/images/val/1.png", cv2.imread("set/images/val/1.jpg"))
    Path("set/images/val/1.jpg").unlink()
    drawn.json["val"]["images"][1]["file_name"] = "1.png"
    drawn.config(DataFormat.coco)
    Path("set/data.yaml").write_text("train: images/train\nval: images/val\nnc: 2\nnames: [cat, dog]\n")
    Path("set/names.txt").write_text("cat\ndog\n")
    Path("set/images.txt").write_text("".join(f"images/train/{number}.jpg\n" for number in range(4)))
    Path("set/obj.data").write_text("classes=2\nnames=names.txt\ntrain=images.txt\nvalid=images\n")
    Path("set/list.txt").write_text("0\n1\n2\n")
    for name in ("set/voc/Annotations", "set/voc/JPEGImages", "own/model"):
        Path(name).mkdir(parents=True)
    for number in range(4):
        shutil.copy(f"set/images/train/{number}.jpg", f"set/voc/JPEGImages/{number}.jpg")
        size = "<size><width>128</width><height>96</height></size>"
        Path(f"set/voc/Annotations/{number}.xml").write_text(voc_text(size).replace("b.png", f"{number}.jpg"))
    Path("small.cfg").write_text(cfg_text())
    save_darknet_weights(Darknet(parse_cfg(cfg_text(), "small.cfg")), "small.weights")
    video(Path("video.avi"), 3)
    Path("mine.yaml").write_text("# @package _global_\ndefaults:\n  - override /optim: adamw\noptim:\n  lr: 0.001\n")
    Path("own/model/mine.yaml").write_text("defaults:\n  - base\ncfg: small.cfg\nanchors: [[10, 14], [23, 27]]\n")
    parts = "\n".join(word.removeprefix("data.").replace("=", ": ", 1) for word in COCO[-2:])
    Path("mine_data.yaml").write_text(f"defaults: [coco]\nname: mine\nroot: set\n{parts}\n")
    row = {"image_id": 1, "category_id": 5, "bbox": [20, 30, 40, 24], "score": 0.5}
    Path("results.json").write_text(json.dumps([row, row | {"image_id": 2}]))


def start(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """The exit code of a program in ``folder``, as of Popen, and what it said."""
    child: Any = fork_context().Process(target=run_here, args=(arguments, folder))
    child.start()
    child.join(SECONDS)
    if child.is_alive():
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return child.exitcode, (folder.parent / "said").read_text(errors="backslashreplace")


def run_here(arguments: Sequence[str], folder: Path) -> None:
    from conf.cli import program
    from conf.cli.command_line import print_error
    from conf.schema import TrainConfig

    os.setsid()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(folder)
    (folder.parent / "said").unlink(missing_ok=True)
    write_to("../said")
    sys.argv, code = list(arguments), 0
    try:
        if arguments[0] == "prepare":
            prepare()
        else:
            program.start(arguments[0])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        code = print_error(error, TrainConfig)
    sys.exit(code)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "work"
    folder.mkdir()
    for arguments in (["prepare"], [*TRAIN, *COCO, "run_dir=run"], [*TRAIN, *COCO, "run_dir=run2", "train.seed=1"]):
        code, said = start(arguments, folder)
        assert code == 0, said
    shutil.rmtree(folder / "index")
    return folder


def spoil(path: Path, damage: str) -> None:
    kind, _, seed = damage.partition(":")
    old = path.read_bytes()
    path.unlink()
    if kind in PLACES:
        PLACES[kind](path)
    else:
        path.write_bytes(DAMAGES[kind](old, random.Random(seed)))


def problem_of(code: int, said: str, program: str) -> str:
    """What is wrong with an end; empty for success and for one sentence with exit code 2."""
    if code < 0:
        return "hangs" if code == -signal.SIGKILL else f"dies of {signal.Signals(-code).name}"
    if "Traceback" in said:
        return " | ".join(said.strip().splitlines()[-3:])
    sentences = re.findall(r"^error: .*", said, re.M)
    if code == 0 or (code == 1 and program == "check_data"):
        return ""
    if code != 2 or len(sentences) != 1:
        return f"exit code {code}, {len(sentences)} sentences: {said[-500:]!r}"
    return f"a sentence of {len(sentences[0])} characters" if len(sentences[0]) > 2100 else ""


@pytest.mark.release
def test_programs_take_hostile_files_and_options_or_say_what_is_wrong(whole: Path, tmp_path: Path) -> None:
    wrong = list[str]()
    for number, (file, damage, arguments) in enumerate([*FILES, *(("", "", options) for options in OPTIONS)]):
        folder = tmp_path / str(number) / "above" / "work"
        shutil.copytree(whole, folder)
        if file.startswith("index/"):  # which this makes
            assert start(arguments, folder)[0] == 0
            shutil.rmtree(folder / "out")
        if file:
            spoil(sorted(filter(Path.is_file, folder.glob(file)))[0], damage)
        problem = problem_of(*start(arguments, folder), arguments[0])
        left = {path.name for path in (*folder.parents[1].iterdir(), *folder.parent.iterdir())}
        problem += f" wrote {left}" * bool(left - {"above", "work", "said"} and not arguments[-1].endswith("=../.."))
        wrong += [f"{file} {damage} {arguments}: {problem}"] * bool(problem)
        shutil.rmtree(tmp_path / str(number))
    assert not wrong, "\n".join(wrong)
