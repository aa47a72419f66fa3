"""What a person sees of a training on terminals of several kinds and sizes: a real process and a
pty, whose output an emulator turns into a screen.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pyte
import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
SESSION = [sys.executable, "-m", "tests.train_utils.terminal.session"]


def run_on_terminal(folder: Path, columns: int, end: str = "close", **environment: str) -> tuple[bytes, int]:
    """The bytes that a terminal of 40 lines gets from the session, and its exit code."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    names = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    inherited = {key: value for key, value in os.environ.items() if key not in names}
    process = subprocess.Popen(
        [*SESSION, str(folder), end], stdin=theirs, stdout=theirs, stderr=theirs, cwd=REPOSITORY,
        env={**inherited, "TERM": "xterm-256color", **environment},
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
    return seen, process.wait()


def screen(seen: bytes, columns: int) -> tuple[list[str], pyte.Screen]:
    """The lines that are left on the screen."""
    emulator = pyte.Screen(columns, 40)
    pyte.ByteStream(emulator).feed(seen)
    return [line.rstrip() for line in emulator.display if line.strip()], emulator


@pytest.mark.parametrize(
    ("columns", "titles"),
    [
        (120, "epoch step loss box obj cls AP AP50 AP75 img/s wait mem time left best"),
        (80, "epoch loss box obj cls AP AP50 img/s time best"),
        (60, "epoch loss AP AP50 img/s time best"),
    ],
)
def test_the_table_has_the_columns_that_fit(tmp_path: Path, columns: int, titles: str) -> None:
    seen, code = run_on_terminal(tmp_path, columns)
    assert code == 0
    lines, emulator = screen(seen, columns)
    words = ("many", "images", "and", "boxes", "train:")
    table = [line for line in lines if line.split()[0] not in words]
    assert [line.split() for line in table[:1]] == [titles.split()]
    note = next(index for index, line in enumerate(table) if line.startswith("rank 0: a note"))
    rows = [line for index, line in enumerate(table) if index not in (0, note)]
    assert [row.split()[0] for row in rows] == ["1/3", "2/3", "3/3"], "no live line is left over"
    assert [row.endswith("*") for row in rows] == [False, True, False]
    assert all(len(line) <= columns for line in lines)
    at_ap = table[0].index(" AP ") + 3
    assert [row[:at_ap].split()[-1] for row in rows] == ["-", "0.250", "0.167"], "columns stand under their titles"
    prose = " ".join(line for line in lines if line not in table)
    assert prose == "train: " + "many images and " * 12 + "boxes", "wrapped at words"
    assert not emulator.cursor.hidden and (b"\x1b[1;32m" in seen), "the best row is green"


@pytest.mark.parametrize(("columns", "shown"), [(80, ["loss", "img/s", "wait"]), (60, ["loss"])])
def test_the_live_line(tmp_path: Path, columns: int, shown: list[str]) -> None:
    seen, code = run_on_terminal(tmp_path, columns, "kill")
    assert code == -signal.SIGKILL
    lines, emulator = screen(seen, columns)
    assert lines[-2] == "rank 0: a note in the middle of an epoch"
    found = re.fullmatch(r"epoch 3/3 (\S+) +50%  0:00:03 left(.*)", lines[-1])
    assert found is not None and len(found[1]) >= 10 and len(lines[-1]) <= columns, lines[-1]
    assert [word for word in ("loss", "img/s", "wait") if word in found[2]] == shown
    assert not emulator.cursor.hidden, "a killed process leaves the cursor"


def test_an_error_leaves_the_terminal_whole(tmp_path: Path) -> None:
    seen, code = run_on_terminal(tmp_path, 100, "fail")
    lines, emulator = screen(seen, 100)
    assert code == 1 and lines[-1] == "ValueError: broken" and not emulator.cursor.hidden
    assert not any("left" in line and "50%" in line for line in lines), "the live line is gone"


def test_no_colour(tmp_path: Path) -> None:
    seen, _ = run_on_terminal(tmp_path, 80, NO_COLOR="1")
    assert not re.search(rb"\x1b\[[\d;]*3\d", seen) and b"\x1b[1m" in seen


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"FORCE_COLOR": "1"}])
def test_plain_lines_elsewhere(tmp_path: Path, environment: dict[str, str]) -> None:
    if "TERM" in environment:
        shown = run_on_terminal(tmp_path, 200, **environment)[0].decode().replace("\r\n", "\n")
    else:
        command, env = [*SESSION, str(tmp_path), "close"], {**os.environ, **environment}
        done = subprocess.run(command, cwd=REPOSITORY, env=env, capture_output=True, text=True)
        assert done.returncode == 0 and done.stderr == ""
        shown = done.stdout
    assert "\x1b" not in shown and "\r" not in shown
    rows = [line for line in shown.splitlines() if re.match(r" +(epoch|\d/3) ", line) or line.startswith("epoch")]
    assert [row.split()[:2] for row in rows] == [
        ["epoch", "step"], *([f"{epoch}/3", str(4 * epoch - back)] for epoch in (1, 2, 3) for back in (2, 0))
    ]  # fmt: skip
    assert "evaluate  10/10" in shown
    log = (tmp_path / "train.log").read_text()
    assert "\x1b" not in log and [line[20:] for line in log.splitlines()[1:]] == [
        line
        for line in shown.splitlines()[1:]
        if not line.startswith("evaluate") and line.split()[1] not in ("2", "6", "10")
    ], "the log has the rows of epochs"
