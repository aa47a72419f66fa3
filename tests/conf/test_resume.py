"""The options of a resumed run: which run it is, and which options may change in it."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml

from conf.entry import compose, to_dictionary
from conf.failures import ConfigError
from conf.messages import kinds_of
from conf.report import save_config
from conf.resume import complete_training, continue_run
from conf.schema import TrainConfig
from train_utils.errors import TrainError
from train_utils.options import MAY_CHANGE, is_covered


def compose_training(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides), complete_training)


def test_resume_takes_the_run_s_options_then_those_named(tmp_path: Path) -> None:
    save_config(tmp_path, compose_training("experiment=quickstart", "optim.lr=0.5", "data.workers=3"))
    config = compose_training(f"resume={tmp_path}", "data=bccd", "train.epochs=7", "++data.workers=1")
    assert config.optim.lr == 0.5 and config.train.batch_size == 8 and config.name == "quickstart", "not the run's"
    assert config.train.epochs == 7 and config.data.name == "bccd" and config.data.workers == 1, "not those named"
    assert config.resume == str(tmp_path) and config.run_dir is None


def test_a_damaged_config_yaml_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for content in (b"", b"{", b"a: [", b"text", b"[1, 2]", b"\0\0\0", b"a: 1", b"train: [", b"\xff\xfe\x00"):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^{path} [^\n]+\. fix: a copy of it, [^\n]+$"):
            compose_training(f"resume={tmp_path}")
    path.unlink()
    with pytest.raises(ConfigError, match=r"holds no config\.yaml\. fix: "):
        compose_training(f"resume={tmp_path}")


@pytest.mark.parametrize("call", range(1, 7))
def test_a_full_disk_leaves_the_configuration_as_it_was(
    call: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever write, sync or rename is the one that fails."""
    save_config(tmp_path, compose("train", TrainConfig, ["experiment=quickstart"]))
    before, calls = (tmp_path / "config.yaml").read_bytes(), itertools.count(1)

    def failing(function: Callable[..., object], *arguments: object) -> object:
        if next(calls) == call:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    changed = compose("train", TrainConfig, ["experiment=quickstart", "data.workers=3"])
    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, partial(failing, getattr(os, name)))
        with pytest.raises(TrainError, match=r"cannot write \S+config\.yaml \(No space left on device\)\. fix: "):
            save_config(tmp_path, changed)
    copies = [path.read_bytes() for path in tmp_path.glob("config_until_*.yaml")]
    renamed = call == 6  # only the folder's sync is left then
    assert ((tmp_path / "config.yaml").read_bytes() != before) == renamed
    assert all(content == before for content in copies) and not list(tmp_path.glob("*.tmp"))
    save_config(tmp_path, changed)
    assert "workers: 3" in (tmp_path / "config.yaml").read_text()


def test_a_training_that_torchrun_may_start_again_goes_on_in_its_own_folder_and_in_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also on a node whose own count of restarts is 0."""
    now = to_dictionary(compose("train", TrainConfig, ["experiment=quickstart"]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    own, foreign = (tmp_path / "runs" / now["name"] / name for name in ("torchrun-7", "newer"))
    for folder in (own, foreign):
        (folder / "checkpoints").mkdir(parents=True)
        (folder / "config.yaml").write_text(yaml.safe_dump(now))
    (foreign / "checkpoints" / "last.pt").write_text("")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    assert continue_run(now, [])["resume"] == str(own), "also without a checkpoint: it begins again there"
    (own / "checkpoints" / "last.pt").write_text("")
    assert continue_run(now, [])["resume"] == str(own)
    assert continue_run(now | {"resume": str(foreign)}, ["resume"])["resume"] == str(foreign), "the user decides"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=r"restart this training 3 times .* fix: torchrun --rdzv-id="):
        continue_run(now, [])
    assert continue_run(now | {"run_dir": str(own)}, ["run_dir"])["resume"] == str(own)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert continue_run(now, [])["resume"] is None, "nothing is started again"


def test_places_in_the_saved_options_hold_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a folder without a slash; words for published weights and names of the zoo stay."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    for weights, absolute in (("before", f"{tmp_path}/before"), ("coco", "coco"), ("backbone", "backbone")):
        config = compose_training(f"model.weights={weights}", "data.root=coco")
        assert (config.model.weights, config.model.cfg) == (absolute, "yolov3-spp")
        assert config.data.root == f"{tmp_path}/coco"
    assert compose_training().model.weights is None


def test_what_may_change_are_options() -> None:
    keys = kinds_of(TrainConfig)
    assert not [named for named in MAY_CHANGE if not any(is_covered(key, (named,)) for key in keys)]
