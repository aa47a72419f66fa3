"""How a training asks its job script for a requeue; in this process."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from conf.schema import TrainConfig
from tests.small_run import small_run
from train import train
from train_utils.checkpoint import CheckpointWriter, load_last

STEPS = 2  # of each of two epochs


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "marker"
    monkeypatch.setenv("REQUEUE_FILE", str(path))
    return path


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    return small_run(tmp_path / "shapes", tmp_path / "run", "train.batch_size=8", "train.epochs=2")


def signal_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Send this process a real signal just before it makes ``step``."""
    is_due = CheckpointWriter.is_due

    def signalled(self: CheckpointWriter, steps_done: int) -> bool:
        if steps_done == step:
            os.kill(os.getpid(), number)
        return is_due(self, steps_done)

    monkeypatch.setattr(CheckpointWriter, "is_due", signalled)


@pytest.mark.release
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGHUP])  # test_stop.py has the others
def test_a_stop_by_slurm_asks_for_a_requeue_behind_the_checkpoint_and_only_with_more_to_do(
    number: signal.Signals, config: TrainConfig, marker: Path, monkeypatch: pytest.MonkeyPatch, request
) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # under nohup the suite inherits an ignored SIGHUP
    request.addfinalizer(lambda: signal.signal(number, before))
    run, write_text, seen = marker.with_name("run"), Path.write_text, []

    def watched(path: Path, *arguments: str, **more: str) -> int:
        if path == marker:
            seen.append(load_last(run)[0]["step"])
        return write_text(path, *arguments, **more)

    monkeypatch.setattr(Path, "write_text", watched)
    with monkeypatch.context() as patch:
        signal_at(patch, 1, number)
        train(config)
    assert marker.exists() and seen == [1], "not behind its checkpoint"
    marker.unlink()
    with monkeypatch.context() as patch:  # in the last step: the run is over and shows its metrics
        signal_at(patch, 2 * STEPS, number)
        train(replace(config, run_dir=None, resume=str(run)))
    assert not marker.exists()
    assert "best AP" in (run / "train.log").read_text()


@pytest.mark.release
def test_ctrl_c_asks_for_no_requeue_and_without_a_job_script_nothing_is_asked(config, marker, monkeypatch) -> None:
    run = marker.with_name("run")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        signal_at(patch, 1, signal.SIGINT)
        train(config)
    assert load_last(run)[0]["step"] == 1
    monkeypatch.delenv("REQUEUE_FILE")
    signal_at(monkeypatch, 2, signal.SIGUSR1)
    train(replace(config, run_dir=None, resume=str(run)))
    assert load_last(run)[0]["step"] == 2
    assert {path.name for path in marker.parent.iterdir()} <= {"run", "shapes", "index"}
