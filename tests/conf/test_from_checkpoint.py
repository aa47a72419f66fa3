"""What a command line leaves open: options of runs, and published weights from a server here."""

import hashlib
import os
import re
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hydra.core.hydra_config import HydraConfig

from conf import ConfigError, TrainError
from conf.cli.from_checkpoint import complete_training
from conf.cli.program import options_of, start
from conf.cli.run_files import fetch_weights, weights_folder
from conf.compose import compose, to_dictionary
from conf.schema import TrainConfig
from data import DataError, read_names
from models import Darknet, ModelError, save_darknet_weights, zoo_cfg
from models import config as model_options
from models.config import COCO_NAMES, PUBLISHED, Published
from tests.data.sets import a_few_of
from tests.file_server import serving
from tests.runs.kill_resume import differences
from tests.small_run import dying_after, rows, small_run
from train import train
from train_utils.build import build_model
from train_utils.checkpoint import load_last, save_checkpoint
from train_utils.inference.open_checkpoint import open_detector
from train_utils.optim import Schedule
from train_utils.report.run_report import save_config

CONTENT = np.random.default_rng(0).bytes(30_000)
SHA1 = hashlib.sha1(CONTENT).hexdigest()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("YOLO_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("data.io.RETRIES", 0)
    return tmp_path / "home"


def test_the_folder() -> None:
    assert weights_folder({"YOLO_HOME": "/weights", "XDG_CACHE_HOME": "/x"}) == Path("/weights")
    assert weights_folder({"XDG_CACHE_HOME": "/x"}) == Path("/x/hydra-yolov3-spp")
    assert weights_folder({}) == Path.home() / ".cache" / "hydra-yolov3-spp"


def test_only_the_right_file_is_used(home: Path) -> None:
    home.mkdir()
    path = home / "a.weights"
    with serving(CONTENT) as server:
        entry = Published(("yolov3",), "coco", f"{server.url}/a.weights", len(CONTENT), "0" * 40)
        for by_hand in (b"", CONTENT):
            path.write_bytes(by_hand)
            with pytest.raises(DataError, match=r"a\.weights is damaged"):
                fetch_weights(entry)
        right = entry._replace(sha1=SHA1)
        assert fetch_weights(right) == path and path.read_bytes() == CONTENT
    assert fetch_weights(right) == path, "the server is gone"


def test_every_published_file_is_checked_and_none_is_left_half(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)  # between two attempts
    with serving(CONTENT) as server:
        for entry in PUBLISHED:
            ours = entry._replace(url=f"{server.url}/{entry.file_name}")
            server.limits = [10_000]
            with pytest.raises(DataError, match=r"cannot be fetched .* fix: curl "):
                fetch_weights(ours)
            with pytest.raises(DataError, match="is damaged, or another file"):
                fetch_weights(ours)
            assert not any(home.iterdir()), entry.name
        monkeypatch.setattr("data.io.RETRIES", 1)
        server.limits = [10_000]
        sha256 = hashlib.sha256(CONTENT).hexdigest()
        path = fetch_weights(ours._replace(size=None, sha1=None, sha256=sha256))
    assert path.read_bytes() == CONTENT


def test_a_network_starts_from_them_and_keeps_its_own_heads(tmp_path, monkeypatch, home) -> None:
    source = Darknet(zoo_cfg("yolov4-tiny"))
    save_darknet_weights(source, tmp_path / "whole")
    save_darknet_weights(source, tmp_path / "cut", up_to_layer=29)
    config = compose("train", TrainConfig, ["model=yolov4-tiny", "model.weights=coco"]).model
    with serving((tmp_path / "whole").read_bytes()) as server:
        entries = [
            entry._replace(url=f"{server.url}/{entry.file_name}", sha1=None)
            for entry in PUBLISHED
            if "yolov4-tiny" in entry.networks
        ]
        monkeypatch.setattr(model_options, "PUBLISHED", entries)
        detector = open_detector(None, config, None, None)
        assert (detector.names[0], detector.names[-1], server.requests) == ("person", "toothbrush", 1)
        assert detector.model.layers[36].conv.weight.equal(source.layers[36].conv.weight)
        model, report = build_model(config, 3)
        assert "its heads were left out and start fresh (for 80 classes, here 3)" in str(report)
        assert model.layers[35].conv.weight.equal(source.layers[35].conv.weight)
        of_darknet = read_names(COCO_NAMES)[0]
        assert "motorbike" in of_darknet
        of_coco = [{"motorbike": "motorcycle", "sofa": "couch"}.get(name, name) for name in of_darknet]
        for names in (of_darknet, of_coco):
            report = build_model(config, 80, names=names)[1]
            assert report is not None and not report.heads_left_out
        for car_and in (["motorcycle", "zebra-crossing"], ["motorbike", "zebra-crossing"]):
            names = ["car", *car_and]
            kept = f"kept boxes, objectness and 2 of 3 classes by name: car, {car_and[0]}; fresh: zebra-crossing"
            assert kept in str(build_model(config, 3, names=names)[1])
            with pytest.raises(ConfigError, match=r"has 80 classes, but names= or data name 3, car, "):
                build_model(config, 3, whole=True, names=names)
        server.content = (tmp_path / "cut").read_bytes()
        backbone = replace(config, weights="backbone")
        model, report = build_model(backbone, 3)
        assert "the file ends after layer" in str(report) and server.requests == 2
        assert model.layers[28].conv.weight.equal(source.layers[28].conv.weight)
        with pytest.raises(ConfigError, match=r"this suits training only"):
            build_model(backbone, None, whole=True)


def test_a_backbone_of_timm_is_known_by_its_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    torch.save({"stem.conv1.conv.weight": torch.ones(32)}, tmp_path / "a.pth")
    config = compose("train", TrainConfig, ["model=yolov3", "model.weights=timm:darknet53.c2ns_in1k"]).model
    entry = next(entry for entry in PUBLISHED if entry.alias == config.weights)
    content = (tmp_path / "a.pth").read_bytes()
    with serving(content) as server:
        for digest, said in (
            ("00000000", r"a\.pth is damaged, or another file"),
            (hashlib.sha256(content).hexdigest()[:8], "is not a darknet53"),  # as which it is read
        ):
            monkeypatch.setattr(model_options, "PUBLISHED", [entry._replace(url=f"{server.url}/a.pth", sha256=digest)])
            with pytest.raises((DataError, ModelError), match=said):
                build_model(config, 3)


def compose_training(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides), complete_training)


def test_resume_takes_the_run_s_options_then_those_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "runs" / "quickstart" / "first"
    run.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    save_config(run, compose_training("experiment=quickstart", "optim.lr=0.5", "data.workers=3"))
    (run / "checkpoints").mkdir()
    for file in ("last.pt", "best.pt"):
        (run / "checkpoints" / file).touch()
    for name in (run, run / "checkpoints" / "last.pt", "runs/quickstart", "last"):
        searched = f"hydra.searchpath=[file://{tmp_path}]"  # as --config-dir does
        config = compose_training(f"resume={name}", "train.epochs=7", "++data.workers=1", searched)
        assert config.optim.lr == 0.5 and config.train.batch_size == 16 and config.name == "quickstart", "not the run's"
        assert config.train.epochs == 7 and config.data.workers == 1, "not those named"
        assert Path(str(config.resume)).absolute() == run and config.run_dir is None
    with pytest.raises(ConfigError, match=r"^resume=nowhere: there is no nowhere/config\.yaml\. fix: "):
        compose_training("resume=nowhere")
    for file in ("checkpoints/best.pt", "config.yaml"):
        with pytest.raises(ConfigError, match=rf"^resume=\S+{file}: .*\. fix: the folder of a run"):
            compose_training(f"resume={run}/{file}")
    (run / "checkpoints" / "last.pt").unlink()
    (run / "checkpoints" / "best.pt").unlink()
    assert compose_training(f"resume={run}", "data=bccd").data.name == "bccd", "it begins again"


def test_a_resume_that_would_train_otherwise_is_refused_by_name(tmp_path: Path) -> None:
    save_config(tmp_path, compose_training("experiment=quickstart", "loss=darknet"))
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "last.pt").write_text("")
    resume = f"resume={tmp_path}"
    machine = "evaluate.every=1", "train.timeout_seconds=9", "data.workers=1"
    config = compose_training(resume, "train.epochs=9", "train.patience=3", *machine)
    assert (config.loss.name, config.train.epochs, config.train.patience) == ("darknet", 9, 3)
    for given in (["train.seed=3", "train.micro_batch_size=4", "train.epochs=9"], ["experiment=from-scratch"]):
        with pytest.raises(ConfigError, match=r"the training would change \(.*\)\. fix: ") as refused:
            compose_training(resume, *given)
        assert "train.epochs" not in str(refused.value), "that option may change"
        for key in given if len(given) > 1 else ["train.batch_size"]:
            assert key.partition("=")[0] in str(refused.value) or "epochs" in key
    with pytest.raises(ConfigError, match=r"loss\.name: darknet -> yolov3"):
        compose_training(resume, "loss=yolov3")


@pytest.mark.release
def test_more_epochs_are_the_same_wherever_they_are_cut_and_follow_the_schedule_of_all(tmp_path, monkeypatch) -> None:
    whole = tmp_path / "whole"  # of 2 steps in an epoch
    more = "train.batch_size=8", "train.epochs=1", "evaluate.every=1", "train.save_every_steps=1", "loss=darknet"
    train(small_run(tmp_path / "shapes", whole, *more))
    run = shutil.copytree(whole, tmp_path / "cut")
    train(compose_training(f"resume={whole}/checkpoints/last.pt", "train.epochs=3"))
    with dying_after(monkeypatch, 3):
        train(compose_training(f"resume={run}", "train.epochs=3"))
    assert load_last(run)[0]["step"] == 3
    train(compose_training(f"resume={run}"))
    expected, found = load_last(whole)[0], load_last(run)[0]
    for part in ("step", "metrics", "model", "ema"):
        assert differences(found[part], expected[part], part) == []
    assert (run / "metrics.csv").read_bytes() == (whole / "metrics.csv").read_bytes()
    optim = compose_training(f"resume={whole}").optim
    schedules = ((Schedule(optim, 2, steps), last) for steps, last in ((2, 1), (6, 3), (6, 5)))
    rates = [optim.lr * (schedule.warmup(last) * schedule.lr_factor(last)) for schedule, last in schedules]
    assert [float(row["lr"]) for row in rows(whole)] == rates
    log = (whole / "train.log").read_text()
    assert "changed: train.epochs: 1 -> 3" in log and log.count("follow the schedule of the new train.epochs") == 1


def test_a_configuration_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(TrainError, match=r"cannot write \S+config\.yaml \(No space left on device\)\. fix: "):
        save_config(tmp_path, compose_training("experiment=quickstart"))


def test_a_training_that_torchrun_may_start_again_needs_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    now = to_dictionary(compose("train", TrainConfig, ["experiment=quickstart"]))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match=r"restart this training 3 times .* fix: torchrun --rdzv-id="):
        complete_training(now, [])
    assert complete_training(now, ["resume"])["resume"] is None, "the user decides"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with runs of several ages; some of the newest have no checkpoint."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(HydraConfig.instance(), "cfg", None)  # of a multirun before
    state = {"config": to_dictionary(compose_training("data=shapes"))}
    for age, name in enumerate(("runs/c/broken", "runs/a/broken", "runs/c/d", "runs/a/b", "runs/a/z", "coco/a")):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        (tmp_path / name / "config.yaml").touch()
        os.utime(tmp_path / name / "config.yaml", (1000 - age, 1000 - age))
        if "broken" not in name:
            save_checkpoint(tmp_path / name / "checkpoints" / "best.pt", state)
    (tmp_path / "runs" / "eval" / "of_today").mkdir(parents=True)
    return tmp_path


NETWORK = "model=yolov3", "model.weights"


@pytest.mark.release
@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("train", NETWORK), ("eval", ["ckpt"]), ("eval", ["data=shapes", *NETWORK]), ("predict", ["source=a", "ckpt"]),
        ("predict", ["source=a", *NETWORK]), ("convert", ["out=a.weights", "ckpt"]),
    ],
)  # fmt: skip
def test_short_names_mean_the_newest_run_with_a_checkpoint(program: str, options: list[str], runs: Path) -> None:
    of_checkpoint = options[-1] == "ckpt"
    for name, newest in {
        "runs/a": "runs/a/b", "last": "runs/c/d", "coco": "coco/a", "runs/a/z/checkpoints/best.pt": None,
    }.items():  # fmt: skip
        config = options_of(program, [*options[:-1], f"{options[-1]}={name}"])
        found = config.ckpt if of_checkpoint else config.model.weights
        if name == "coco" and not of_checkpoint:
            assert found == "coco"
        else:
            assert Path(found).absolute() == runs / (newest or name)


def test_what_is_called_last_comes_before_the_word(runs: Path) -> None:
    shutil.move("runs/a/z", "last")
    assert options_of("export", ["ckpt=last"]).ckpt == "last"
    shutil.rmtree("last")
    shutil.rmtree("runs")
    for command in (("export", ["ckpt=last"]), ("train", ["model.weights=last"])):
        with pytest.raises(ConfigError, match=rf"^last is the newest run with a checkpoint: {runs}/runs has none"):
            options_of(*command)


@pytest.mark.parametrize("job", a_few_of(["slurm", "torchrun", "train -m", "tune trials=1 --"]))
def test_a_training_that_starts_again_names_its_weights(job, runs, monkeypatch, capsys) -> None:
    if job == "slurm":
        monkeypatch.setenv("SLURM_JOB_ID", "1")
    elif job == "torchrun":
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the tests go on in this process
    program, *before = job.split() if " " in job else ["train"]
    seeds = "train.seed=1,2" if before else "train.seed=1"
    monkeypatch.setattr(sys, "argv", [program, *before, "data=shapes", "model.weights=runs/a", seeds])
    with pytest.raises(SystemExit):
        start(program)
    said = capsys.readouterr().err
    assert re.search(r"model\.weights=runs/a may be another run later\.\nfix: model\.weights=runs/a/b\n", said)


def test_places_in_the_saved_options_hold_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "before").mkdir()
    for weights, absolute in (("before", f"{tmp_path}/before"), ("coco", "coco"), ("backbone", "backbone")):
        config = compose_training("model=yolov3-spp", f"model.weights={weights}", "data.root=coco")
        assert (config.model.weights, config.model.cfg) == (absolute, "yolov3-spp")
        assert config.data.root == f"{tmp_path}/coco"
    assert compose_training().model.weights is None


@pytest.mark.parametrize("place", ["last.pt", "checkpoints/last.pt", "best.pt"])
def test_a_checkpoint_without_its_run_folder_names_what_it_is_good_for(place: str, tmp_path: Path) -> None:
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with pytest.raises(ConfigError, match=rf"resume=\S+{place}: .* a new run with model\.weights=\S+{place}$"):
        compose_training(f"resume={path}")
