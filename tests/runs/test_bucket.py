"""A training on pictures in a bucket keeps the promises of one on a disk, though requests fail."""

import random
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.file_server import SECRET, serving_bucket
from tests.runs.kill_resume import PATIENCE, differing_parts, finish, kill_once, largest_difference, parts_of, start
from train_utils.checkpoint import load_last

OPTIONS = ("train.precision=float64", "train.epochs=3", "evaluate.every=2")
FAULTS = ("503", "slow", "cut", "reset")


def writers_in(folder: Path) -> list[int]:
    """The processes whose output is a file in ``folder``: ranks and what they started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (entry / "fd" / "1").readlink().is_relative_to(folder):
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_killed_on_a_bucket_and_resumed_it_is_the_run_from_the_disk_on_any_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, killed, alone = (tmp_path / name for name in ("disk", "killed", "alone"))
    assert finish(start(disk, 2, *OPTIONS), PATIENCE), Path(f"{disk}.txt").read_text()[-3000:]
    generator = random.Random(0)
    (drawn,) = (tmp_path / "shapes").iterdir()
    with serving_bucket(drawn) as bucket:
        bucket.fault = lambda key, _: generator.choice(FAULTS) if generator.random() < 0.02 else None
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        options = (*OPTIONS, "data.train.images=s3://b/train", "data.val.images=s3://b/val")
        event = kill_once(killed, 2, generator, 0.2, "at a random time", options)
        assert "rank" in event, event
        until = time.monotonic() + 10
        while (left := writers_in(tmp_path)) and time.monotonic() < until:
            time.sleep(0.1)
        assert not left, "loader processes outlive a training that was killed"
        for run, ranks in ((killed, 2), (alone, 1)):
            processes = start(run, ranks, *options, "data.workers=0")
            assert finish(processes, PATIENCE), Path(f"{run}.txt").read_text()[-3000:]
        assert len(bucket.asked) > 200
    assert differing_parts(disk, killed) == []
    before, after = (parts_of(load_last(run)[0]) for run in (disk, alone))
    assert max(largest_difference(before[part], after[part]) for part in before) <= 1e-9
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(SECRET.encode() in content for content in written)
