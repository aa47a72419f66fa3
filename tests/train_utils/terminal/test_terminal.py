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

from tests.train_utils.terminal.session import FIGURES, SAID

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
    ("columns", "end", "environment", "titles", "live"),
    [
        (120, "close", {}, "epoch step loss box obj cls AP AP50 AP75 img/s wait mem time left best", None),
        (80, "kill", {}, "epoch loss box obj cls AP AP50 img/s time best", "loss 12.35  wait 12%  "),
        (60, "kill", {"NO_COLOR": "1"}, "epoch loss AP AP50 img/s time best", "loss 12.35"),
    ],
)
def test_a_terminal_shows_what_fits(
    tmp_path: Path, columns: int, end: str, environment: dict[str, str], titles: str, live: str | None
) -> None:
    seen, code = run_on_terminal(tmp_path, columns, end, **environment)
    assert code == (0 if end == "close" else -signal.SIGKILL)
    lines, emulator = screen(seen, columns)
    assert not emulator.cursor.hidden, "a killed process leaves the cursor"
    start = next(index for index, line in enumerate(lines) if line.split()[0] == "epoch")
    assert " ".join(lines[:start]) == SAID and all(len(line) <= columns for line in lines[:start]), "wrapped at words"
    table = lines[start : start + 3]
    assert table[0].split() == titles.split()
    assert [row.split()[0] for row in table[1:]] == ["1/3", "2/3"], "no live line is left over"
    assert [row.endswith("*") for row in table[1:]] == [False, True]
    assert all(len(line) <= columns for line in table)
    at_ap = table[0].index(" AP ") + 3
    assert [row[:at_ap].split()[-1] for row in table[1:]] == ["-", "0.250"], "columns stand under their titles"
    assert (b"\x1b[1;32m" in seen) == (not environment), "the best row is green"
    assert b"\x1b[1m" in seen and not (environment and re.search(rb"\x1b\[[\d;]*3\d", seen))
    if live is None:
        figures = "".join(line.ljust(columns) for line in lines[-3:]).rstrip()
        assert lines[start + 3].startswith("rank 0: a note") and lines[-3] == "figures:", lines
        assert figures.endswith(FIGURES.split("\n")[1].rstrip()), "rows are not broken at words"
        return
    assert lines[start + 3] == "rank 0: a note in the middle of an epoch"
    found = re.fullmatch(r"epoch 3/3 (\S+ *) 50%  0:01:20 left  (.*)", lines[-1])
    assert found is not None and len(found[1]) >= 8 and len(lines[-1]) <= columns, lines[-1]
    assert found[2].startswith(live)


def test_an_error_leaves_the_terminal_whole(tmp_path: Path) -> None:
    seen, code = run_on_terminal(tmp_path, 100, "fail")
    lines, emulator = screen(seen, 100)
    assert code == 1 and lines[-1] == "ValueError: broken" and not emulator.cursor.hidden
    assert not any("left" in line and "50%" in line for line in lines), "the live line is gone"


def test_elsewhere_progress_comes_in_lines_on_stderr(tmp_path: Path) -> None:
    """Also where colours are forced, and on a terminal that cannot rewrite a line."""
    env = {**os.environ, "FORCE_COLOR": "1"}
    done = subprocess.run([*SESSION, str(tmp_path), "close"], cwd=REPOSITORY, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and not set("\x1b\r") & set(done.stdout + done.stderr)
    lines = done.stderr.splitlines()
    epochs = [f"epoch {epoch}/3  {done}/40  loss 12.35  wait 12%  " for epoch in (1, 2, 3) for done in (20, 40)]
    expected = [part for start in (0, 2, 4) for part in (*epochs[start : start + 2], "evaluate  10/10  ")]
    assert [line.startswith(start) for line, start in zip(lines, expected, strict=True)] == [True] * 9, lines
    shown = done.stdout.splitlines()
    assert [line.split()[0] for line in shown] == [
        "train:", "epoch", "1/3", "2/3", "rank", "3/3", "figures:", "a",
    ]  # fmt: skip
    log = (tmp_path / "train.log").read_text().splitlines()
    assert [line[20:] for line in log] == shown and all(re.match(r"\d{4}-\d\d-\d\d \d\d:", line) for line in log)

    dumb = run_on_terminal(tmp_path, 200, TERM="dumb")[0].decode().replace("\r\n", "\n")
    assert not set("\x1b\r") & set(dumb)
    assert sorted(line.split()[:2] for line in dumb.splitlines()) == sorted(line.split()[:2] for line in lines + shown)
