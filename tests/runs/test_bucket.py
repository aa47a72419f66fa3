"""A training on pictures in a bucket keeps the promises of one on a disk, though requests fail."""

import random
from pathlib import Path

import pytest

from tests.file_server import SECRET, serving_bucket
from tests.runs.kill_resume import differing_parts, kill_once, largest_difference, parts_of, train_well
from tests.runs.process_group import no_process_left
from train_utils.checkpoint import load_last

OPTIONS = ("train.precision=float64", "train.epochs=3", "evaluate.every=2")
FAULTS = ("503", "slow", "cut", "reset")


@pytest.mark.release
def test_killed_on_a_bucket_and_resumed_it_is_the_run_from_the_disk_on_any_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, killed, alone = (tmp_path / name for name in ("disk", "killed", "alone"))
    train_well(disk, 2, *OPTIONS)
    generator = random.Random(0)
    (drawn,) = (tmp_path / "shapes").iterdir()
    with serving_bucket(drawn) as bucket:
        bucket.fault = lambda key, _: generator.choice(FAULTS) if generator.random() < 0.02 else None
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        options = (*OPTIONS, "data.train.images=s3://b/train", "data.val.images=s3://b/val")
        with no_process_left(tmp_path, "fd/1"):  # loader processes look for their rank every 5 s
            event = kill_once(killed, 2, generator, 0.2, "at a random time", options)
        assert "rank" in event, event
        for run, ranks in ((killed, 2), (alone, 1)):
            train_well(run, ranks, *options, "data.workers=0")
        assert len(bucket.asked) > 200
    assert differing_parts(disk, killed) == []
    before, after = (parts_of(load_last(run)[0]) for run in (disk, alone))
    assert max(largest_difference(before[part], after[part]) for part in before) <= 1e-9
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)
