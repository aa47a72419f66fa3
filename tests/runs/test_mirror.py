"""A run that is copied to a bucket goes on on another machine, though requests fail."""

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conf.compose import compose
from conf.errors import TrainError
from conf.schema import TrainConfig
from tests.file_server import SECRET, Bucket, serving_bucket
from tests.runs.kill_resume import PATIENCE, differing_parts, finish, start, train_well
from train_utils.mirror import refuse_other

OPTIONS = ("train.epochs=3", "evaluate.every=1", "logger.every_steps=1")
FAULTS = ("503", "slow", "cut", "reset")


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    (tmp_path / "bucket").mkdir()
    with serving_bucket(tmp_path / "bucket") as running:
        for name, value in running.environment.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.mark.release
def test_killed_and_its_folder_lost_it_goes_on_from_the_bucket_as_if_undisturbed(
    tmp_path: Path, bucket: Bucket
) -> None:
    generator, mirror = random.Random(0), "s3://b/runs/a"
    bucket.fault = lambda key, _: generator.choice(FAULTS) if generator.random() < 0.02 else None
    whole, last = tmp_path / "whole", bucket.folder / "runs" / "a" / "checkpoints" / "last.pt"
    train_well(whole, 2, *OPTIONS)
    for place, goes_on in (("one", "resume=auto"), ("two", f"resume={mirror}")):
        before, copies = bucket.asked.count("runs/a/checkpoints/last.pt"), 4
        processes = start(tmp_path / place, 2, *OPTIONS, f"run_mirror={mirror}", goes_on)
        while bucket.asked.count("runs/a/checkpoints/last.pt") < before + copies and processes[0].is_alive():
            time.sleep(0.005)
        for process in processes:
            os.kill(process.pid, signal.SIGKILL)
        assert not finish(processes, PATIENCE)
        shutil.rmtree(tmp_path / place)
    last.write_bytes(last.read_bytes()[:-1000])
    train_well(tmp_path / "three", 2, *OPTIONS, f"run_mirror={mirror}/")
    assert differing_parts(whole, tmp_path / "three") == []
    assert (whole / "steps.csv").read_bytes() == (tmp_path / "three" / "steps.csv").read_bytes()
    assert last.read_bytes() == (tmp_path / "three" / "checkpoints" / "last.pt").read_bytes()
    assert "last.previous.pt, because" in (tmp_path / "three" / "train.log").read_text()
    with pytest.raises(TrainError, match=rf"fix: resume={mirror} "):
        refuse_other(compose("train", TrainConfig, [f"run_mirror={mirror}"]))
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)


@pytest.mark.release
def test_a_bucket_that_refuses_costs_a_line(tmp_path: Path, bucket: Bucket) -> None:
    bucket.fault = lambda key, number: "denied"
    train_well(tmp_path / "run", 1, *OPTIONS, "run_mirror=s3://b/runs/a", "resume=null")
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("run_mirror") == 1 and (tmp_path / "run" / "report.html").exists()
