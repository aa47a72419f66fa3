"""What a person sees of a training: lines on stderr, a live line on a terminal."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from train_utils.progress import LINES, Progress

REPOSITORY = Path(__file__).resolve().parents[2]
SESSION = """
from train_utils import progress as screen
screen.SECONDS_BETWEEN_UPDATES = -1.0
with screen.Progress(40, "epoch 1/3", True) as progress:
    progress.at(20, lambda: {"loss": "12.35"})
    screen.print_lines("a note in the middle of an epoch")
    progress.at(40)
"""


@pytest.mark.parametrize("total", [100, 7, 1, 11])
def test_progress_lines(total: int, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(total, "evaluate", enabled=True) as progress:
        for done in range(1, total + 1):
            progress.at(done, lambda: {"loss": "1.235"})
    said = capsys.readouterr()
    shown = said.err.splitlines()
    assert len(shown) == min(total, LINES) and said.out == "", "stdout is for results"
    assert re.fullmatch(rf"evaluate  {total}/{total}  loss 1\.235  \S+ img/s  0:00:00 left", shown[-1])


@pytest.mark.parametrize(("total", "enabled"), [(4, False), (0, True)])
def test_silent_progress_computes_no_figures(total: int, enabled: bool, capfd: pytest.CaptureFixture[str]) -> None:
    with Progress(total, "x", enabled) as progress:
        for done in range(1, 5):
            progress.at(done, lambda: pytest.fail("a loss is read, which waits for the device"))
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_a_live_line_below_the_others() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SESSION], stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"},
    )  # fmt: skip
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the process has ended
            break
        seen += piece
    os.close(ours)
    assert process.wait() == 0 and b"\x1b[?25l" not in seen, "a killed process would leave no cursor"
    text = re.sub(rb"\x1b\[[\d;?]*[A-Za-z]", b"", seen).decode()
    assert "20/40  loss 12.35" in text and "a note in the middle of an epoch\r\n" in text
