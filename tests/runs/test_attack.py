"""Hostile files and options: each program takes them or refuses them in one sentence.

A case damages one file of a tiny set, network or run, or gives one option an extreme value, and
starts a program in a child of its own. It holds if the program succeeds, or ends with exit code 2
and one sentence. A traceback, a crash, a hang, memory without bounds and files outside its folder
are failures. The suite runs a part; this runs all, about 9,200, in an hour:

    python -m tests.runs.test_attack 10000
"""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
SECONDS = 30.0  # that a case may take: a healthy one takes about one, and the machine is shared
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
    *CFG, "train.image_size=32", "train.batch_size=3", "train.epochs=1", "train.device=cpu", "logger.pictures=false",
    "augment.mosaic=0.5", "evaluate.batch_size=3",
]  # fmt: skip
TRAIN = ["train", *TINY, "run_dir=out"]
CHECK = ["check_data", *CFG, "image_size=32", "pictures=2", "out=out"]
EVAL = ["eval", "device=cpu", *DATA, "evaluate.image_size=32", "out=out"]
PREDICT = ["predict", "device=cpu", "image_size=32", "source=set/images/val", "out=out", "confidence=0.01"]
EXPORT = ["export", "format=torch", "out=out/x.pt2", "image_size=32"]
CONVERT, TO_DARKNET = ["convert", "out=out.pt"], ["convert", "out=out.weights"]
ANCHORS = ["anchors", *CFG, "image_size=32", "rounds=1"]
RESUME = ["train", "resume=run", "train.epochs=2", *DATA]
COMPARE = ["compare", "run", "run2", "resamples=10"]
CKPT = "ckpt=run/checkpoints/best.pt"

# Each file with the programs that read it.
READERS: dict[str, list[list[str]]] = {
    "set/images/train/1.jpg": [[*TRAIN, *COCO], [*CHECK, *COCO], [*TRAIN, *COCO, "data.on_error=skip"],
                               [*TRAIN, *YOLO], [*TRAIN, *VOC, "data.cache=disk"]],
    "set/images/val/1.png": [[*TRAIN, *COCO], [*CHECK, *YOLO], [*EVAL, CKPT], [*PREDICT, CKPT],
                             [*PREDICT, CKPT, "on_error=skip"], [*PREDICT, CKPT, "source=set/images/val/1.png"]],
    "set/train.json": [[*TRAIN, *COCO], [*CHECK, *COCO], [*CHECK, "data=set/train.json"], [*ANCHORS, *COCO]],
    "set/val.json": [[*EVAL, CKPT], [*CHECK, *COCO], [*PREDICT, *WEIGHTS, "names=set/val.json"]],
    "set/labels/train/1.txt": [[*TRAIN, *YOLO], [*CHECK, *YOLO], [*CHECK, *LIST], [*CHECK, "data=set/images/train"]],
    "set/data.yaml": [[*TRAIN, *YOLO], [*CHECK, *YOLO], [*PREDICT, *WEIGHTS, "names=set/data.yaml"],
                      [*CHECK, "data=set"]],
    "set/obj.data": [[*TRAIN, *OBJ], [*CHECK, *OBJ]],
    "set/names.txt": [[*TRAIN, *LIST], [*CHECK, *OBJ], [*PREDICT, *WEIGHTS, "names=set/names.txt"]],
    "set/images.txt": [[*TRAIN, *LIST], [*CHECK, *LIST], [*CHECK, *OBJ]],
    "set/list.txt": [[*TRAIN, *VOC], [*CHECK, *VOC]],
    "set/voc/Annotations/1.xml": [[*TRAIN, *VOC], [*CHECK, *VOC], [*CHECK, "data=set/voc"]],
    "small.cfg": [[*TRAIN, *COCO], [*CHECK, *COCO], [*PREDICT, *WEIGHTS], [*EXPORT, *WEIGHTS], [*ANCHORS, *COCO],
                  [*CONVERT, *CFG, "weights=small.weights"]],
    "small.weights": [[*TRAIN, *COCO, WEIGHTS[1]], [*EVAL, *WEIGHTS, *COCO], [*PREDICT, *WEIGHTS],
                      [*EXPORT, *WEIGHTS], [*CONVERT, *CFG, "weights=small.weights"]],
    "run/checkpoints/best.pt": [[*TRAIN, *COCO, f"model.weights={CKPT[5:]}"], [*EVAL, CKPT], [*PREDICT, CKPT],
                                [*EXPORT, CKPT], [*TO_DARKNET, CKPT], [*PREDICT, "ckpt=run"]],
    "run/checkpoints/last.pt": [RESUME, [*TO_DARKNET, "ckpt=run/checkpoints/last.pt"]],
    "run/config.yaml": [RESUME, COMPARE, ["compare", "run"], [*PREDICT, "ckpt=run"]],
    "run/best_detections.npz": [RESUME, COMPARE, ["compare", "run"]],
    "run/metrics.csv": [RESUME, ["compare", "run"]],
    **{file: [RESUME] for file in ("run/steps.csv", "run/train.log")},
    "mine.yaml": [[*TRAIN, *COCO, "experiment=mine.yaml"]],
    "own/model/mine.yaml": [[*CHECK, *COCO, "--config-dir", "own", "model=mine"]],
    "mine_data.yaml": [[*CHECK, "data=mine_data.yaml"]],
    "results.json": [["eval", *COCO, "detections=results.json"]],
    "video.avi": [[*PREDICT, CKPT, "source=video.avi"], [*PREDICT, CKPT, "source=.", "on_error=skip"]],
    "index/*.images": [[*TRAIN, *COCO, "data.cache=disk"]],
    "index/**/*": [[*TRAIN, *COCO], [*EVAL, CKPT]],
}  # fmt: skip

FOUND = re.compile("|".join([  # cases that failed once
    r"\] (train .* optim=nan|check_data .* model=\[\[1\]\]|train .* data.shapes=\{a: 1\}|demo .* plugins=\[\[1\]\])$",
    r"\] (eval .* evaluate.image_size=\?\?\?|convert .* out=(''|\.\./\.\.))$", r"results.json deep 0",
    r"\] train .* (devices|train.seed|loss.positives)=9+$", r"predict .* e=9+$", r"mine.yaml (not UTF-8|two words) 0\]",
    r"run/(config.yaml (deep|not UTF-8|other kind) 0\] compare .* run2|metrics.csv (not UTF-8|a folder) 0\] train)",
    r"best_detections.npz empty 0\] compare .* run2", r"1.xml (a pipe|missing) 0\] check_data .* data=set/voc",
    r"set/names.txt (a pipe|not UTF-8) 0\] check_data", r"set/labels/train/1.txt deep 0\] train", r"a.yaml deep 0",
    r"train.log a pipe", r"\*.images a (folder|pipe)", r" cfg=\.\./\.\.$", r"optim.lr=1e39$", r"model/mine.yaml deep 1",
]))  # fmt: skip

# Values in place of one of a text: wrong types, numbers without bounds, references, code.
WORDS = [
    "null", "-1", "0", "NaN", "nan", "inf", "-Infinity", "1e400", "1e30", "9" * 30, "9" * 5000, "1.5", '""', '"x"',
    "[]", "{}", "[1]", '{"a": 1}', "true", "", "${oc.env:HOME}", "!!python/object/apply:os.system [touch ../escaped]",
    "../escaped", "/dev/zero", '"caf\\ud8ff"', "\u202e\U0001f600", "&a [*a]", "2001-13-45", "1:2:3", "0x10", "#",
]  # fmt: skip
VALUES = [
    "nan", "inf", "-1", "0", "1e39", "''", "null", "[a,b]", "{a: 1}", "x" * 3000, "../..", "'${oc.env:HOME}'",
    '"ü€😀"', "true", "???", "'${name}'", "1e-300", "[]", "[[1]]", "-inf", "0.5", "'a\\nb'", "99999999999999999999",
]  # fmt: skip
WANTED = "train.epochs=99999999999999999999"  # and only that long
ABOVE = {f"{key}=../.." for key in ("out", "run_dir", "data.root", "data.index_dir", "cfg")}  # where to write


class Case(NamedTuple):
    """A program with its options, and the file that is damaged for it."""

    arguments: tuple[str, ...]
    file: str = ""
    damage: str = ""
    seed: int = 0

    def __str__(self) -> str:
        what = f"{self.file} {self.damage} {self.seed}" if self.file else "option"
        return f"[{what}] {self.arguments[0]} ... {' '.join(word[:60] for word in self.arguments[-3:])}"


def text_damage(replace: Callable[[str, random.Random], str]) -> Callable[[bytes, random.Random], bytes]:
    """A damage of bytes from one of their text."""
    return lambda old, draw: replace(old.decode("utf-8", "surrogateescape"), draw).encode("utf-8", "surrogateescape")


def other_word(text: str, draw: random.Random) -> str:
    """The text with one of its words or numbers replaced."""
    words = list(re.finditer(r'"[^"\n]*"|-?[\w.]+|\S', text)) or [re.match("", text)]
    word: Any = draw.choice(words)
    return text[: word.start()] + draw.choice(WORDS) + text[word.end() :]


def other_line(text: str, draw: random.Random) -> str:
    """The text with one line left out, twice, or a thousand times."""
    lines = text.splitlines(keepends=True) or [""]
    at = draw.randrange(len(lines))
    return "".join([*lines[:at], *lines[at : at + 1] * draw.choice([0, 2, 1000]), *lines[at + 1 :]])


def flipped(old: bytes, draw: random.Random) -> bytes:
    """The bytes with one to four others."""
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
SEVERAL, OF_TEXTS = ("deep", "a word", "two words"), ("a word", "two words", "a line")
TEXTS = (".json", ".yaml", ".txt", ".xml", ".cfg", ".csv", ".data", ".log")
PLACES: dict[str, Callable[[Path], Any]] = {
    "missing": lambda path: None,
    "a folder": Path.mkdir,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to nothing": lambda path: path.symlink_to("nowhere"),
    "a pipe": os.mkfifo,
    "an endless device": lambda path: path.symlink_to("/dev/zero"),
}


def option_cases() -> Iterator[Case]:
    """Every option of every program with each of VALUES."""
    from conf.run import PROGRAMS
    from conf.schema import kinds_of

    bases = {
        "train": [*TRAIN, *COCO], "eval": [*EVAL, CKPT], "predict": [*PREDICT, CKPT], "export": [*EXPORT, CKPT],
        "check_data": [*CHECK, *COCO], "anchors": [*ANCHORS, *COCO], "convert": [*TO_DARKNET, CKPT],
        "compare": COMPARE,
    }  # fmt: skip
    for name, program in PROGRAMS.items():
        for key in sorted(kinds_of(program.schema).keys() - {"debug"}):  # which asks for tracebacks
            options = (f"{key}={value}" for value in VALUES)
            yield from (Case((*bases.get(name, [name]), option)) for option in options if option != WANTED)


def file_cases(seeds: int = 1) -> Iterator[Case]:
    """Every file of READERS with each damage and place, for each of its readers."""
    for file, readers in READERS.items():
        for arguments in readers:
            for place in PLACES:
                # A pipe or a device that the command line itself names is wanted.
                if place not in ("a pipe", "an endless device") or not any(file in word for word in arguments):
                    yield Case(tuple(arguments), file, place)
            for damage in DAMAGES:
                if damage not in OF_TEXTS or file.endswith(TEXTS):
                    count = 1 if damage in ("empty", "zeros") else seeds * (1 + 2 * (damage in SEVERAL))
                    yield from (Case(tuple(arguments), file, damage, seed) for seed in range(count))


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
    """Run a program in ``folder``, in a child of this process, which saves the seconds of imports.

    Returns its exit code, as of Popen, and stderr. A child that hangs is killed.
    """
    started = time.perf_counter()
    child = os.fork()
    if child == 0:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.chdir(folder)
        for number, name in enumerate(("/dev/null", "../out", "../err")):
            os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
        os._exit(run_here(arguments))
    while time.perf_counter() - started < SECONDS:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            break
        time.sleep(0.005)
    else:
        os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    text = (folder.parent / "err").read_text(errors="backslashreplace")
    return os.waitstatus_to_exitcode(status), text


def run_here(arguments: Sequence[str]) -> int:
    """The exit code of a program in this process."""
    from conf.run import options_of, print_error, run
    from conf.schema import TrainConfig

    sys.argv, code = list(arguments), 0
    try:
        if arguments[0] == "prepare":
            prepare()
        elif arguments[0] in ("demo", "tune", "get_data", "get_weights"):  # they wait, or use the network
            options_of(arguments[0], arguments[1:])
        else:
            run(arguments[0])
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException as error:
        code = print_error(error, TrainConfig)
    sys.stdout.flush()
    return code


class Attack:
    """A folder with all that cases damage, and the way to run one."""

    def __init__(self, root: Path) -> None:
        self.root, self.whole = root, root / "whole" / "work"
        self.whole.mkdir(parents=True)
        os.environ["HOME"] = os.environ["YOLO_HOME"] = str(root / "home")
        for arguments in (["prepare"], [*TRAIN, *COCO, "run_dir=run"], [*TRAIN, *COCO, "run_dir=run2", "train.seed=1"]):
            code, errors = start(arguments, self.whole)
            assert code == 0, errors
        shutil.rmtree(self.whole / "index")

    def problem(self, case: Case) -> str:
        """What is wrong with the way in which a program ends; empty where a case holds."""
        box = self.root / "box"
        folder = box / "above" / "work"
        try:
            shutil.copytree(self.whole, folder)
            if case.file.startswith("index/"):  # which this makes
                code, errors = start(case.arguments, folder)
                assert code == 0, errors
                shutil.rmtree(folder / "out")
            if case.file:
                spoil(sorted(filter(Path.is_file, folder.glob(case.file))), case)
            problem = problem_of(*start(case.arguments, folder), case.arguments[0])
            left = {path.name for path in (*box.iterdir(), *folder.parent.iterdir())} - {"above", "work", "out", "err"}
            is_wanted = not left or case.arguments[-1] in ABOVE
            return problem if problem or is_wanted else f"wrote {left}"
        finally:
            shutil.rmtree(box)


def spoil(files: list[Path], case: Case) -> None:
    """Damage one of these files, which a case names."""
    draw = random.Random(f"{case.file} {case.damage} {case.seed}")
    path = draw.choice(files)
    old = path.read_bytes()
    path.unlink()
    if case.damage in PLACES:
        PLACES[case.damage](path)
    else:
        path.write_bytes(DAMAGES[case.damage](old, draw))


def problem_of(code: int, errors: str, program: str) -> str:
    """What is wrong with an end; empty for success and for one sentence with exit code 2."""
    if code < 0:
        return "hangs" if code == -signal.SIGKILL else f"dies of {signal.Signals(-code).name}"
    if "Traceback" in errors:
        return " | ".join(errors.strip().splitlines()[-3:])
    sentences = re.findall(r"^error: .*", errors, re.M)
    if code == 0 or (code == 1 and program == "check_data"):
        return ""
    if code != 2 or len(sentences) != 1:
        return f"exit code {code}, {len(sentences)} sentences: {errors[-500:]!r}"
    return f"a sentence of {len(sentences[0])} characters" if len(sentences[0]) > 2100 else ""


def main() -> None:
    """Run so many cases, those of FOUND first; exit with code 1 if any fails.

    More words are regular expressions of the cases to choose from.
    """
    import torch

    torch.set_num_threads(1)
    for name in "train predict export scripts.check_data scripts.compare torchvision torch._dynamo".split():
        importlib.import_module(name)  # before forks
    cases = [case for case in [*file_cases(), *option_cases()] if re.search("|".join(sys.argv[2:]), str(case))]
    random.Random(0).shuffle(cases)
    cases = sorted(cases, key=lambda case: not FOUND.search(str(case)))[: int(sys.argv[1])]
    failed = 0
    with tempfile.TemporaryDirectory() as root:
        attack = Attack(Path(root))
        for case in cases:
            began, problem = time.perf_counter(), attack.problem(case)
            failed += bool(problem)
            print(f"{'FAILED' if problem else 'held'} {time.perf_counter() - began:.1f} s {case} {problem}", flush=True)
    print(f"{len(cases)} tried, {failed} failed")
    sys.exit(failed > 0)


def test_programs_take_hostile_files_and_options_or_say_what_is_wrong() -> None:
    """A part of the cases, the same ones each time."""
    command = [sys.executable, "-m", "tests.runs.test_attack", "45"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert "45 tried, 0 failed" in done.stdout, f"{done.stdout}{done.stderr}"


if __name__ == "__main__":
    main()
