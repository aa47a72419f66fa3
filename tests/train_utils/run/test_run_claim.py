"""A run folder has one holder: in races, after crashes of every kind, across machines."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from train_utils.errors import TrainError
from train_utils.launch import Job
from train_utils.run import run_claim
from train_utils.run.run_claim import Claim, claim_folder, newest_claim

ALONE = Job("", "", 0, "", 0)
HOLDER = """
import sys, time
from pathlib import Path
from train_utils.launch import Job
from train_utils.run.run_claim import claim_folder
while time.time() < float(sys.argv[2]):
    pass
claim = claim_folder(Path(sys.argv[1]), Job("", "", 0, "", 0), False)
print(claim if isinstance(claim, str) else "mine", flush=True)
sys.stdin.read()
"""


def start(folder: Path, at: float = 0.0) -> subprocess.Popen[str]:
    """A process that claims the folder at the time ``at`` and holds it until its input ends."""
    arguments = [sys.executable, "-c", HOLDER, str(folder), str(at)]
    return subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds pass faster."""
    for name, seconds in (("BEAT_SECONDS", 0.05), ("SILENT_SECONDS", 0.6), ("PAUSE_SECONDS", 0.02)):
        monkeypatch.setattr(run_claim, name, seconds)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, Claim]]:
    claim = claim_folder(tmp_path, ALONE, patient=False)
    assert isinstance(claim, Claim)
    yield tmp_path, claim
    claim.release()


def from_elsewhere(folder: Path, **changes: Any) -> None:
    """Make the folder's claim look like another machine's."""
    (path,) = folder.glob(".claim-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"machine": "elsewhere", "host": "elsewhere"} | changes))


def touched_before(folder: Path, seconds: float) -> None:
    (path,) = folder.glob(".claim-*.json")
    os.utime(path, (time.time() - seconds, time.time() - seconds))


@pytest.mark.parametrize("stale", [False, True])
def test_of_processes_that_race_for_a_folder_one_gets_it_also_when_its_holder_was_killed(
    stale: bool, tmp_path: Path
) -> None:
    if stale:
        killed = start(tmp_path)
        assert said(killed) == "mine"
        killed.kill()  # not yet waited for: a zombie is dead
    at = time.time() + 1.5
    racing = [start(tmp_path, at) for _ in range(6)]
    answers = [said(process) for process in racing]
    for process in racing:
        process.communicate()
    if stale:
        killed.communicate()
    assert answers.count("mine") == 1, answers
    holder = racing[answers.index("mine")].pid
    for answer in set(answers) - {"mine"}:
        assert answer == "a run that is just starting" or answer.startswith(f"process {holder} (host "), answer
    assert len(list(tmp_path.iterdir())) == 1, "dead claims pile up"


def test_a_released_folder_is_free_and_remembers_that_its_training_is_over(held: tuple[Path, Claim]) -> None:
    folder, claim = held
    assert newest_claim(folder, ALONE)[1] is True and claim.ended_after == 0
    claim.ended_after = 7
    claim.release()
    assert newest_claim(folder, ALONE)[1] is False
    again = claim_folder(folder, ALONE, patient=False)
    assert isinstance(again, Claim) and again.ended_after == 7
    again.release(used=False)
    assert again.before == json.loads(next(folder.glob(".claim-*.json")).read_text())


def test_a_stopped_process_lives(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert said(process) == "mine"
    process.send_signal(signal.SIGSTOP)
    assert newest_claim(tmp_path, ALONE)[1] is True
    process.kill()
    process.wait()
    assert newest_claim(tmp_path, ALONE)[1] is False


def test_a_process_number_that_was_given_again_is_no_holder(held: tuple[Path, Claim]) -> None:
    """As in a restarted container, where every program gets its previous process id."""
    folder, _ = held
    (path,) = folder.glob(".claim-*.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"born": "1"}))
    assert newest_claim(folder, ALONE)[1] is False


def test_a_copied_folder_is_not_held_by_the_run_that_it_was_copied_from(held: tuple[Path, Claim], fast: None) -> None:
    folder, _ = held
    shutil.copytree(folder, folder / "copy")
    assert newest_claim(folder / "copy", ALONE)[1] is None, "only time can tell: some file systems number files anew"
    claim = claim_folder(folder / "copy", ALONE, patient=True)
    assert isinstance(claim, Claim)
    claim.release()


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        (ALONE, ALONE, None),
        (Job("41", "0", 0, "", 0), Job("41", "0", 1, "", 0), False),  # requeued
        (Job("41", "3", 0, "", 0), Job("41", "0", 1, "", 0), False),
        (Job("41", "0", 0, "", 0), Job("41", "1", 0, "", 0), None),  # another step, which may run beside it
        (Job("41", "0", 0, "", 0), Job("42", "0", 1, "", 0), None),
        (Job("41_1", "0", 0, "", 0), Job("41_2", "0", 1, "", 0), None),
        (Job("", "", 0, "id", 0), Job("", "", 0, "id", 1), False),  # torchrun started it again
        (Job("", "", 0, "id", 0), Job("", "", 0, "other", 1), None),
        (Job("", "", 0, "", 0), Job("", "", 0, "", 1), None),
        (Job("", "", 0, "id", 1), Job("", "", 0, "id", 0), None),
    ],
)
def test_a_holder_on_another_machine(before: Job, now: Job, expected: bool | None, tmp_path: Path) -> None:
    claim = claim_folder(tmp_path, before, patient=False)
    assert isinstance(claim, Claim)
    from_elsewhere(tmp_path)
    assert newest_claim(tmp_path, now)[1] is expected
    touched_before(tmp_path, run_claim.SILENT_SECONDS + 5)
    assert newest_claim(tmp_path, now)[1] is False
    claim.release()


def test_a_holder_on_another_machine_is_known_by_its_touches(held: tuple[Path, Claim], fast: None) -> None:
    folder, first = held
    from_elsewhere(folder)
    first.release()
    beating = claim_folder(folder, ALONE, patient=False)  # beats as `fast` says
    assert isinstance(beating, Claim)
    from_elsewhere(folder)
    answer = claim_folder(folder, ALONE, patient=True)
    assert isinstance(answer, str) and "elsewhere" in answer
    beating._over.set()  # as after a power cut
    taken = claim_folder(folder, ALONE, patient=True)
    assert isinstance(taken, Claim)
    taken.release()


def test_a_run_whose_folder_was_taken_over_writes_no_more(held: tuple[Path, Claim], fast: None) -> None:
    folder, first = held
    first.release()
    slept = claim_folder(folder, ALONE, patient=False)
    assert isinstance(slept, Claim)
    slept.check()
    from_elsewhere(folder)
    touched_before(folder, 60)
    other = claim_folder(folder, ALONE, patient=False)
    assert isinstance(other, Claim)
    until = time.monotonic() + 5
    while not slept._lost and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(TrainError, match=rf"process {os.getpid()} \(host .* took over .*fix: "):
        slept.check()
    slept.release()
    assert newest_claim(folder, ALONE)[1] is True, "the loser took the folder from the other"
    other.check()
    other.release()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"machine": "x"'])
def test_a_claim_that_is_being_written_or_was_cut_holds_for_a_while(content: str, tmp_path: Path, fast: None) -> None:
    (tmp_path / ".claim-3.json").write_text(content)
    assert claim_folder(tmp_path, ALONE, patient=False) == "a run that is just starting"
    claim = claim_folder(tmp_path, ALONE, patient=True)
    assert isinstance(claim, Claim)
    claim.release()


def test_a_full_disk_leaves_no_claim_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(os, "fsync", full)
        claim_folder(tmp_path, ALONE, patient=False)
    assert list(tmp_path.iterdir()) == []
