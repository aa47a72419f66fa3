"""Programs answer before torch is imported: help, tab completion and refused options."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import yaml

from conf.programs import PROGRAMS

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "torchvision", "matplotlib", "cv2", "pycocotools", "numpy")
CASES = {  # options and what stderr says; for None stdout has the answer
    "train": {
        "--help": None,
        "--cfg job": None,
        "-sc query=bash": None,
        "--version": None,
        "train.epoch=3": "no option train.epoch; did you mean train.epochs=3?",
        "model=yolov7-tiny model.weights=coco": "model.weights=coco is published for",
        "devices=0": "devices must be a number of processes",
        "train.epochs=0": "train.epochs must be 1 or more, got 0",
        "train.epochs=many": "train.epochs: Value 'many'",
        "data.shapes.seed=1": "data.shapes.seed=1: the section is null here",
        "evaluate.backend=coco": "evaluate.backend",
        "--epochs=3": "--epochs is no option",
        "resume=nowhere": "resume=nowhere holds no config.yaml",
        "--local-rank=x": "needs a number",
    },
    "eval": {"--help": None, "": "nothing to evaluate", "ckpt=nowhere": "there is no checkpoint"},
    "predict": {"--help": None, "": "source has no value", "source=a device=tpu": "device"},
    "export": {"--help": None, "model=yolov3 opset=3": "opset must lie in 18..25"},
    "check_data": {"--help": None, "pictures=-1": "pictures must be 0 or more"},
    "anchors": {"--help": None, "out=mine/a.yaml": "out must be [<folder>/]model/<name>.yaml"},
    "get_data": {"--help": None, "coco2017 keep=true": "no option keep"},
    "get_weights": {"--help": None, "yolo": "no published weights are called 'yolo'"},
    "convert": {"--help": None, "ckpt=nowhere out=a": "there is no checkpoint", "weights=a": "weights=a needs"},
    "demo": {"--help": None, "workers=0": "workers must be 1 or more"},
    "compare": {
        "--help": None,
        "": "runs has no value",
        "--config-dir conf here resamples=1 there": "resamples must be 10 or more",
    },
    "tune": {
        "--help": None,
        "trials=0": "trials must be 1 or more",
        "-- data=bcd optim.lr=1,2": "no choice data=bcd",
    },
}
# Starts each case as `python <program> <options>` does and prints what it wrote, its exit code and
# the modules that it imported.
STARTS = """
import contextlib, io, json, os, runpy, sys
cases, heavy = json.loads(sys.argv[1])
os.environ["COMP_LINE"] = "python train.py data=co"
found = []
for command, options in cases:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        sys.argv = [command, *options.split()]
        try:
            if command.endswith(".py"):
                runpy.run_path(command, run_name="__main__")
            else:
                runpy.run_module(command, run_name="__main__", alter_sys=True)
        except SystemExit as ended:
            code = ended.code or 0
    found.append([code, out.getvalue(), err.getvalue(), [name for name in heavy if name in sys.modules]])
print(json.dumps(found))
"""


def test_help_completion_and_refused_options_need_no_torch() -> None:
    """One process runs all cases: nothing heavy may be imported by any of them."""
    assert CASES.keys() == PROGRAMS.keys()
    cases = [(name, options, said) for name, answers in CASES.items() for options, said in answers.items()]
    given = json.dumps([[(PROGRAMS[name].command, options) for name, options, _ in cases], HEAVY])
    done = subprocess.run(
        [sys.executable, "-c", STARTS, given], cwd=REPOSITORY, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    ours = rf"hydra-yolov3-spp [\d.]+\ntorch {re.escape(version('torch'))}\n"
    for (name, options, said), (code, out, err, imported) in zip(cases, json.loads(done.stdout), strict=True):
        case = f"{PROGRAMS[name].command} {options}: {out}{err}"
        assert imported == [], case
        if said is not None:
            assert code == 2 and err.count("error: ") == 1 and said in err, case
            continue
        assert code == 0 and err == "", case
        if options == "--help":
            assert "Usage: python " in out and "debug=false" in out and "show tracebacks" in out, case
        elif options == "--cfg job":
            assert yaml.safe_load(out)["train"]["epochs"] > 0, case
        else:
            assert options == "--version" or "data=coco" in out.split(), case
            assert options != "--version" or re.match(ours, out), case


def test_nothing_is_installed_under_such_names_as_data_and_models(tmp_path: Path) -> None:
    script = "from importlib.util import find_spec; print([find_spec(name) for name in ('conf', 'data', 'models')])"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "[None, None, None]\n", done.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """``train.py --help | head`` ends quietly: the page is longer than a pipe may still take."""
    program = subprocess.Popen(
        [sys.executable, "train.py", "--help"], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert program.stdout is not None and program.stderr is not None
    program.stdout.close()
    assert (program.stderr.read(), program.wait()) == (b"", -signal.SIGPIPE)
    program.stderr.close()
