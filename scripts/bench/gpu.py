"""What a CPU cannot show about training and evaluating on a GPU, in less than ten minutes.

    python -m scripts.bench.gpu [--tiny] [--seconds 560] [--out gpu.jsonl] [stage ...]

Each stage is a process with a deadline and appends its figures to --out, as JSON lines. The table
comes last, complete as far as the stages came. --tiny takes seconds a stage, needs no GPU, and its
figures mean nothing. Needs torch, torchvision, OpenCV, rich, pyyaml and lazy-loader, for the
stages with a loader also msgspec and pycocotools.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from train_utils.launch.environment import prefer_expandable_segments

# Function below scripts.bench.on_gpu and deadline in seconds, in the order of their worth: the time
# may be over before the last.
STAGES = {
    "machine": ("machine.machine", 45),
    "correct": ("correct.correct", 100),
    "eager": ("training.eager", 80),
    "compiled": ("training.compiled", 150),
    "evaluation": ("scoring.evaluation", 80),
    "loader": ("feeding.loader", 130),
    "sizes": ("training.sizes", 50),
    "losses": ("training.losses", 80),
    "nccl": ("correct.one_rank", 45),
    "tests": ("correct.marked_tests", 90),
    "sizes compiled": ("training.sizes_compiled", 150),
    "graphs": ("training.graphs", 150),
    "autotuned": ("training.autotuned", 240),
}
LEAST_SECONDS = 15  # a stage with less than this left is not begun


class Rows:
    """Figures in a file of JSON lines; ``stage`` is that of new ones."""

    def __init__(self, path: Path, stage: str) -> None:
        self._path, self._stage = path, stage

    def add(self, figure: str, value: float | str, unit: str = "", reach: str = "") -> None:
        """Append a figure; ``reach`` is what it should be."""
        row = {"stage": self._stage, "figure": figure, "value": value, "unit": unit, "reach": reach}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def all(self) -> list[dict[str, Any]]:
        """The figures so far, those of earlier stages included."""
        return [json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines()]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The figures, a line each, by stage."""
    lines, stage = [f"{'':54s} {'measured':>20s}   to reach"], None
    for row in rows:
        if row["stage"] != stage:
            stage = row["stage"]
            lines.append(f"{stage}:")
        value = row["value"]
        shown = value if isinstance(value, str) else f"{value:.4g} {row['unit']}".strip()
        lines.append(f"  {row['figure']:52s} {shown:>20s}   {row['reach']}".rstrip())
    return "\n".join(lines)


def run_stage(command: Sequence[str], seconds: float) -> str:
    """Run a stage's process and all that it starts; return what went wrong, "" if nothing did."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        late = False
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            late = True
        with contextlib.suppress(ProcessLookupError):  # its workers may outlive it
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    if late or code != 0:
        print("\n".join(f"    {line}" for line in lines[-20:]), flush=True)
    if late:
        return f"not done after {seconds:.0f} s"
    return "" if code == 0 else (lines or [f"exit code {code}"])[-1]


def run_stages(names: Sequence[str], options: Sequence[str], out: Path, seconds: float) -> None:
    """Run stages, each until its deadline and none beyond ``seconds`` in all; print the table."""
    out.write_text("", encoding="utf-8")
    end = time.monotonic() + seconds
    for name in names:
        started, rows = time.monotonic(), Rows(out, name)
        if (left := end - started) < LEAST_SECONDS:
            rows.add("whole stage", "no time left")
            continue
        command = [sys.executable, "-m", "scripts.bench.gpu", "--inside", "--out", str(out), *options, name]
        if problem := run_stage(command, min(left, STAGES[name][1])):
            rows.add("whole stage", f"FAILED: {problem}")
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    print(table(Rows(out, "").all()))


def main() -> None:
    """Run the stages; with --inside, in a stage's own process, the stage itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="stage", help=f"{', '.join(STAGES)}; all if none is given")
    parser.add_argument("--tiny", action="store_true", help="small networks and images, without a GPU, too")
    parser.add_argument("--seconds", type=float, default=560, help="limit of all stages together")
    parser.add_argument("--out", type=Path, default=Path("gpu.jsonl"), help="file of the figures; it is replaced")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if unknown := set(given.stages) - set(STAGES):
        parser.error(f"there is no stage {min(unknown)!r}. fix: one of {', '.join(STAGES)}")
    if not given.inside:
        options = ["--tiny"] if given.tiny else []
        run_stages(given.stages or list(STAGES), options, given.out, given.seconds)
        return
    prefer_expandable_segments()  # as the programs do, before torch is imported
    settings = import_module("scripts.bench.on_gpu.common").settings_of(given.tiny)
    for name in given.stages:
        module, function = STAGES[name][0].split(".")
        getattr(import_module(f"scripts.bench.on_gpu.{module}"), function)(settings, Rows(given.out, name))


if __name__ == "__main__":
    main()
