"""What a person sees of a training: lines on stderr, a live line on a terminal."""

import errno
import io
import os
import re
from itertools import pairwise
from pathlib import Path

import pytest

from data.progress import Progress, log, warn

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("total", [100, 1, 0])  # 0: unknown
@pytest.mark.parametrize("seconds", [0.01, 0.3, 4.0, 25.0])  # of a unit
def test_lines_are_ten_seconds_apart(total, seconds, monkeypatch, capsys) -> None:
    units, now, asked = total or 50, [1000.0], list[float]()
    monkeypatch.setattr("data.progress.time.monotonic", lambda: now[0])
    with Progress(total, "evaluate", enabled=True) as progress:
        for done in range(1, units + 1):
            now[0] += seconds
            progress.at(done, lambda: asked.append(now[0]) or {"loss": "1.235"})
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == len(asked) and said.out == "", "stdout is for results"
    assert all(later - earlier >= 10 for earlier, later in pairwise([1000.0, *asked]))
    assert len(asked) >= (units * seconds) // (10 + seconds)
    of_total, left = (rf"/{total}", r"  \d:\d\d:\d\d left") if total else ("", "")
    assert re.fullmatch(rf"(evaluate  \d+{of_total}  loss 1\.235  \S+ img/s{left}\n)*", said.err)


def test_lines_of_programs_go_to_stdout_unless_a_caller_raises_the_level(capsys) -> None:
    log.info("100 % done")
    log.setLevel("WARNING")
    log.info("nobody reads this")
    log.setLevel("INFO")
    assert capsys.readouterr() == ("100 % done\n", "")


class _Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


@pytest.mark.parametrize("kind", ["full", "gone", "closed", "none"])
def test_a_program_goes_on_without_its_streams(kind, monkeypatch) -> None:
    for name in ("stdout", "stderr"):
        closed = io.StringIO()
        closed.close()
        full = os.fdopen(os.open("/dev/full", os.O_WRONLY), "w", encoding="ascii")
        monkeypatch.setattr(f"sys.{name}", {"full": full, "gone": _Gone(), "closed": closed, "none": None}[kind])
    lost: dict[str, str] = {}
    monkeypatch.setattr("data.output.LOST", lost)
    log.info("a line")
    warn("a warning")
    with Progress(3, "evaluate", enabled=True) as progress:
        progress.at(3, dict)
    log.info("é")
    reasons = {"full": "No space left on device", "gone": "Broken pipe", "closed": "closed", "none": "closed"}
    assert [*lost] == ["stdout", "stderr"] and all(reasons[kind] in sentence for sentence in lost.values()), lost


def test_silent_progress_computes_no_metrics(monkeypatch, capfd) -> None:
    monkeypatch.setattr("data.progress.SECONDS_BETWEEN_LINES", -1.0)
    with Progress(4, "x", enabled=False) as progress:
        for done in range(1, 5):
            progress.at(done, lambda: pytest.fail("a loss is read, which waits for the device"))
    assert capfd.readouterr() == ("", "")
