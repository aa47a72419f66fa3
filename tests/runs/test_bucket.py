"""A training with pictures and copies in a bucket goes on anywhere, though requests fail."""

import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from conf import TrainError
from conf.cli.resume import continue_run
from conf.cli.run_files import progress_of
from conf.compose import compose
from conf.schema import TrainConfig
from data import remote
from tests.file_server import SECRET, serving_bucket
from tests.runs.kill_resume import PATIENCE, differing_parts, finish, start, train_well
from train_utils.report.mirror import refuse_other
from train_utils.report.run_report import save_config

OPTIONS = ("train.epochs=2", "evaluate.every=1", "logger.every_steps=1")
PICTURES = ("data.train.images=s3://b/train", "data.val.images=s3://b/val")
FAULTS = ("503", "slow", "cut", "reset")


def test_the_later_of_a_run_and_its_copy_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, mirror = tmp_path / "here", "s3://b/there"
    monkeypatch.setattr(remote, "PATIENCE_SECONDS", 1.0)
    for run, steps in ((here, 20), (tmp_path / "there", 30)):
        (run / "checkpoints").mkdir(parents=True)
        save_config(run, replace(compose("train", TrainConfig, ["data=shapes"]), run_mirror=mirror))
        torch.save({"config": {"train": {"epochs": 9}}, "epoch": 2, "step": steps}, run / "checkpoints" / "last.pt")
    with serving_bucket(tmp_path) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        assert (progress_of(here), progress_of(mirror)) == ((2, 20), (2, 30))
        with pytest.raises(TrainError, match=rf"is ahead of {here}\. fix: resume={mirror}"):
            refuse_other(mirror, str(here))
        torch.save({"epoch": 3, "step": 31}, here / "checkpoints" / "last.pt")
        refuse_other(mirror, str(here))
        asked = {"name": "a", "run_dir": str(here), "run_mirror": mirror, "resume": "auto", "data": {}}
        assert continue_run(asked, ["run_dir", "resume"])["resume"] == str(here)
        torch.save({"epoch": 3, "step": 30}, here / "checkpoints" / "last.pt")
        torch.save({"epoch": 3, "step": 31}, tmp_path / "there" / "checkpoints" / "last.pt")
        assert continue_run(asked, ["run_dir", "resume"])["resume"] == mirror
        bucket.fault = lambda key, number: "denied"
        for resumed in (str(here), None):
            with pytest.raises(TrainError, match=r"another run.*access denied.* fix: try again, or run_mirror=null"):
                refuse_other(mirror, resumed)


@pytest.mark.release
def test_killed_and_its_folder_lost_a_run_goes_on_from_the_bucket_as_if_undisturbed_on_a_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, mirror, whole = random.Random(0), "s3://b/runs/a", tmp_path / "whole"
    train_well(whole, 2, *OPTIONS)
    (drawn,) = (tmp_path / "shapes").iterdir()
    with serving_bucket(drawn) as bucket:
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        bucket.fault = lambda key, _: generator.choice(FAULTS) if generator.random() < 0.02 else None
        last = drawn / "runs" / "a" / "checkpoints" / "last.pt"
        processes = start(tmp_path / "one", 2, *OPTIONS, *PICTURES, f"run_mirror={mirror}")
        while bucket.asked.count("runs/a/checkpoints/last.pt") < 4 and processes[0].is_alive():
            time.sleep(0.005)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        assert not finish(processes, PATIENCE)
        shutil.rmtree(tmp_path / "one")
        last.write_bytes(last.read_bytes()[:-1000])
        goes_on = f"run_mirror={mirror}/", f"resume={mirror}"
        train_well(tmp_path / "two", 2, *OPTIONS, *PICTURES, *goes_on, seconds=4 * PATIENCE)
        assert len(bucket.asked) > 150
        assert last.read_bytes() == (tmp_path / "two" / "checkpoints" / "last.pt").read_bytes()
        with pytest.raises(TrainError, match=rf"fix: resume={mirror} "):
            refuse_other(mirror, None)
        bucket.fault = lambda key, number: "denied" if "runs/" in key else None  # which costs a line
        train_well(tmp_path / "denied", 1, *OPTIONS, "train.epochs=1", "run_mirror=s3://b/runs/b", "resume=null")
    assert differing_parts(whole, tmp_path / "two") == []
    assert (whole / "steps.csv").read_bytes() == (tmp_path / "two" / "steps.csv").read_bytes()
    assert "last.previous.pt, because" in (tmp_path / "two" / "train.log").read_text()
    log = (tmp_path / "denied" / "train.log").read_text()
    assert log.count("run_mirror") == 1 and (tmp_path / "denied" / "report.html").exists()
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)
