"""Processes whose parent is killed; they import only the watch, so they start fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CHILD = """
import os, signal, sys, time
sys.path.insert(0, {repository!r})
from train_utils.launch import orphans
orphans.LOOK_SECONDS, orphans.ORPHAN_SECONDS = 0.05, {seconds}
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
orphans.watch_parent(os.getppid())
print("watching", flush=True)
while not (asked and {listens}):
    time.sleep(0.02)
print("a checkpoint", flush=True)
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])"


def run_orphan(seconds: float, listens: bool) -> str:
    """Kill the parent of a child, wait for the child to exit and return what it printed."""
    child = CHILD.format(repository=str(REPOSITORY), seconds=seconds, listens=listens)
    command = [sys.executable, "-c", PARENT, child]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert parent.stdout is not None and parent.stdout.readline() == "watching\n"
    parent.kill()
    output, _ = parent.communicate(timeout=60)  # ends with the child
    return output


def test_an_orphan_is_asked_to_end_and_has_time_for_it() -> None:
    output = run_orphan(60, listens=True)
    assert "the launcher (process" in output and "in 60 s at the latest" in output
    assert output.endswith("a checkpoint\n")


def test_an_orphan_that_hangs_ends() -> None:
    assert "a checkpoint" not in run_orphan(0.2, listens=False)
