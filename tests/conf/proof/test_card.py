"""What a proof is made of: the user's own files, and only starts that trained."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from conf.build.agreement import ROOT
from conf.entry import compose
from conf.failures import ConfigError
from conf.proof.card import weights_digest
from conf.schema import TrainConfig
from conf.schema_tools import VerifyConfig
from conf.sources.resume import complete_training
from data import ShapesConfig
from models import zoo_cfg
from scripts.verify import verify
from tests.small_run import small_run
from train import train
from train_utils.report.proof import read_proof

SHAPES = ShapesConfig(train_images=40, val_images=4, image_size=64, seed=0)
PLUGINS = ("lines_logger.py", "lion_optimiser.py")


def train_own(folder: Path, home: Path, run: str, *more: str) -> Path:
    """A run of two steps with a .cfg and plugins of ``home``."""
    own = [f"model.cfg='{home}/my.cfg'", listed(home), "optim=lion", "train.epochs=1", "train.batch_size=20"]
    train(small_run(folder / "shapes", SHAPES, folder / run, *own, *more))
    return folder / run


def listed(home: Path) -> str:
    return "plugins=" + str([str(home / name) for name in PLUGINS])


def check(run: Path, *more: str) -> None:
    verify(compose("verify", VerifyConfig, [f"run={run}", *more]))


def replace_text(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def test_files_of_the_user_are_checked_and_may_have_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Plugins, a .cfg and first weights."""
    home = tmp_path / "my höme"
    home.mkdir()
    for path in (zoo_cfg("yolov3-tiny"), *(ROOT / "docs/examples/plugins" / name for name in PLUGINS)):
        shutil.copy(path, home)
    (home / "yolov3-tiny.cfg").rename(home / "my.cfg")
    first = train_own(tmp_path, home, "first") / "checkpoints" / "best.pt"
    run = train_own(tmp_path, home, "run", f"model.weights={first}")
    lines = (run / "lines.jsonl").read_bytes()
    check(run, listed(shutil.copytree(home, tmp_path / "elsewhere")))
    assert capsys.readouterr().out.endswith("nothing differs\n")
    assert lines and (run / "lines.jsonl").read_bytes() == lines, "a logger heard of a replay"

    replace_text(home / "my.cfg", "leaky", "linear")
    replace_text(home / "lion_optimiser.py", "1 - first", "1 - first / 2")
    first.unlink()
    with pytest.raises(SystemExit, match="1"):
        check(run, "steps=0", "score=false")
    assert differences(capsys.readouterr().out) == [
        ("first weights", f"{first} is missing"),
        ("code", "plugin lion_optimiser, network my.cfg"),
    ]
    (home / "lion_optimiser.py").unlink()
    with pytest.raises(ConfigError, match=r"plugins: there is no .*/lion_optimiser\.py\. fix: plugins="):
        check(run, "steps=0")


def differences(said: str) -> Sequence[tuple[str, str]]:
    return re.findall(r"^(.+?) +DIFFERS +(.+)$", said, re.M)


def test_the_digest_is_over_the_raw_and_the_averaged_weights() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    states = [{"model": {"a": raw}, "ema": {"a": average}} for raw in (zero, one) for average in (zero, one)]
    assert len({weights_digest(state) for state in states}) == 4


def test_a_run_that_is_over_keeps_its_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A requeued job may resume it. An extension is another start."""
    run = tmp_path / "run"
    train(small_run(tmp_path / "shapes", SHAPES, run, "train.epochs=1", "train.batch_size=20"))
    before = (run / "proof.json").read_bytes()
    train(compose("train", TrainConfig, [f"resume={run}"], complete_training))
    assert (run / "proof.json").read_bytes() == before
    train(compose("train", TrainConfig, [f"resume={run}", "extend=1"], complete_training))
    proof = read_proof(run)
    assert [start["step"] for start in proof["starts"]] == [0, 2]
    assert proof["weaknesses"][-1].startswith("resumed at step 2 with other options (train.epochs: 1 -> 2, ")
    check(run)
    said = capsys.readouterr().out
    assert said.endswith("nothing differs\n") and "same weights after steps 2 to 4" in said
