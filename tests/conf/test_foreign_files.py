"""A file is never code: what others made imports nothing, runs nothing, refers to nothing."""

import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf.errors import ConfigKeyError

from conf import ConfigError
from conf.cli.command_line import for_user
from conf.cli.program import PROGRAMS
from conf.compose import compose
from tests.data.sets import a_few_of
from tests.small_run import small_run
from train import train
from train_utils.checkpoint import load_checkpoint, save_checkpoint

SECRET = "xyzzy"
CALL = "{_target_: evil.run}"
BOMB = "a0: &a0 [x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
DATA_FILES = {  # a data.yaml, and what the sentence says; "": it is read, and does nothing
    "hydra": (
        f"defaults: [shapes]\nhydra: {{callbacks: {{x: {CALL}}}}}\n",
        "has the key hydra, which is not an option",
    ),
    "package of hydra": (
        f"# @package hydra.callbacks\nformat: coco\nx: {CALL}\n",
        "has the key x, which is not an option",
    ),
    "experiment": ("defaults: [shapes, /experiment/quickstart]\n", "its defaults must be names"),
    "another file": ("defaults: [./other.yaml]\n", "its defaults must be names"),
    "interpolation": ("defaults: [shapes]\nroot: ${oc.env:SECRET}\n", "holds '${oc.env:SECRET}', and only a command"),
    "in a list": ("defaults: [shapes]\nnames: ['${hydra:runtime.cwd}']\n", "holds '${hydra:runtime.cwd}', and only"),
    "name": (
        "defaults: [shapes]\nname: ../../x\n",
        "data.name must be a name without / and control characters, got '../../x'",
    ),
    "target": ("defaults: [shapes]\n_target_: evil.run\n", "has the key _target_, which is not an option"),
    "bomb": (f"{BOMB}defaults: [shapes]\n", "has an alias"),
    "bomb of keys": ("defaults: [shapes]\nshapes: &a {image_size: 64}\ntrain: {<<: [*a, *a]}\n", "has an alias"),
    "of another program": (
        f"train: a\nval: a\nnames: [x]\ndownload: evil.run\nhydra: {CALL}\nplugins: [evil.py]\n",
        "",
    ),
}
SAVED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {  # changes of saved options, and the sentence
    "plugin": (lambda saved: saved.update(plugins=["evil.py"]), "needs plugins=[evil.py]. fix: give their paths"),
    "path": (lambda saved: saved.update(plugins=["../evil.py"]), "needs plugins=[evil.py]. fix: give their paths"),
    "root": (lambda saved: saved["data"].update(root="${oc.env:SECRET}"), "holds '${oc.env:SECRET}', and only"),
    "section": (lambda saved: saved.update(data="${oc.env:SECRET}"), "holds '${oc.env:SECRET}', and only"),
    "target": (lambda saved: saved["data"].update(_target_="evil.run"), "_target_"),
}  # fmt: skip
READERS = {"eval": [], "predict": ["source=x"], "convert": ["out=x.weights"]}  # each its way; what else they need


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train(small_run(folder / "shapes", folder / "run", "train.epochs=1", "train.batch_size=18"))
    return folder / "run"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a module that leaves a trace when it is imported or run."""
    trace = "import pathlib\npathlib.Path(__file__).with_name('trace').touch()\ndef run(*_, **__): ...\n"
    (tmp_path / "evil.py").write_text(trace)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SECRET", SECRET)
    return tmp_path


def outcome(program: str, *words: str) -> str:
    """The options that a program gets, or the sentence instead of them; neither tells a secret."""
    entry = PROGRAMS[program]
    try:
        shown = repr(compose(program, entry.schema, list(words), entry.complete))
    except Exception as error:
        sentence = for_user(error, entry.schema)
        assert sentence is not None, error
        shown = f"error: {sentence}"
    assert SECRET not in shown and "evil" not in sys.modules and not Path("trace").exists()
    return shown


@pytest.mark.parametrize(
    ("case", "program"), [*product(DATA_FILES, ["train"]), *product(("interpolation", "target", "bomb"), ["eval"])]
)
def test_a_data_file_sets_data_alone(case: str, program: str, place: Path) -> None:
    text, sentence = DATA_FILES[case]
    (place / "set.yaml").write_text(text)
    more = ["model=yolov3-tiny", "model.weights=coco"] if program == "eval" else []
    shown = outcome(program, "data=./set.yaml", *more)
    assert sentence in shown and shown.startswith("error: ") == bool(sentence)


@pytest.mark.release
@pytest.mark.parametrize(
    ("case", "program"), [*product(SAVED, ["eval"]), *product(("path", "section"), ("predict", "convert"))]
)
def test_a_checkpoint_imports_nothing_and_refers_to_nothing(case: str, program: str, run: Path, place: Path) -> None:
    change, sentence = SAVED[case]
    state = load_checkpoint(run)
    change(state["config"])
    save_checkpoint(place / "own" / "checkpoints" / "best.pt", state)
    shown = outcome(program, "ckpt=own", *READERS[program])
    assert case == "target" or sentence in shown  # only some programs read data.*
    if "plugins" in sentence:
        outcome(program, "ckpt=own", "plugins=[]", *READERS[program])


@pytest.mark.release
@pytest.mark.parametrize("case", SAVED)
def test_a_resumed_checkpoint_imports_nothing_and_refers_to_nothing(case: str, run: Path, place: Path) -> None:
    change, sentence = SAVED[case]
    shutil.copytree(run, place / "own")
    state = load_checkpoint(run, "last")
    change(state["config"])
    save_checkpoint(place / "own" / "checkpoints" / "last.pt", state)
    # For plugins the list of the command line counts, which is empty.
    refused = nullcontext() if "plugins" in sentence else pytest.raises((ConfigError, ConfigKeyError))
    with refused as raised:
        train(["resume=own", "train.epochs=2"])
    assert raised is None or (sentence in str(raised.value) and SECRET not in str(raised.value))
    assert "evil" not in sys.modules and not Path("trace").exists()


@pytest.mark.parametrize("case", a_few_of([*SAVED, "bomb", "hydra"], 3))
def test_a_run_folder_imports_nothing_and_refers_to_nothing(case: str, run: Path, place: Path) -> None:
    shutil.copytree(run, place / "own")
    path = place / "own" / "config.yaml"
    saved = yaml.safe_load(path.read_text())
    more = {"bomb": BOMB, "hydra": f"hydra: {{callbacks: {{x: {CALL}}}}}\n"}
    change, sentence = SAVED.get(case, (lambda _: None, {"bomb": "has an alias"}.get(case, case)))
    change(saved)
    path.write_text(yaml.safe_dump(saved) + more.get(case, ""))
    shown = outcome("train", "resume=own")
    assert shown.startswith("error: ") and sentence in shown
