"""Verify the proof of a run: hash its files, replay its last steps, score it again.

    python -m scripts.verify runs/coco/<date_time>
    python -m scripts.verify runs/coco/<date_time> data_root=/elsewhere/coco
    torchrun --nproc-per-node=4 -m scripts.verify run=...      # a run on four GPUs
    python -m scripts.verify run=... steps=0 score=false       # only the hashes

Prints a table of the checks. The exit code is 1 if something differs; the last line names it.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.programs import run

    run("verify")
    raise SystemExit

import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from conf.build.batches import open_sets
from conf.build.evaluator import Evaluator
from conf.build.network import model_from_checkpoint
from conf.build.start import prepare_numerics
from conf.entry import defaults, from_dictionary, layered
from conf.failures import USER_ERRORS
from conf.proof.card import weights_digest
from conf.proof.check import Check, check_data, check_program, check_run, judged
from conf.proof.facts import hardware, on_gpu
from conf.schema import TrainConfig
from conf.schema_tools import VerifyConfig
from conf.sources.resume import with_missing
from data import Annotations
from train import train_until
from train_utils.distributed import World, broadcast_text, init_distributed_mode, max_over_ranks
from train_utils.errors import TrainError
from train_utils.loop.stop_and_save import StopRequest
from train_utils.numerics import weights_dtype
from train_utils.report.proof import BEST, FILE, LAST, PREVIOUS, read_proof
from train_utils.run.checkpoint import load_checkpoint
from train_utils.scores.coco_eval import ABSENT
from train_utils.shell import option
from train_utils.terminal.screen import say

ENTRIES = ("starts", "code", "packages", "data", "initial weights", "last steps", "files", "figures")
QUIET = {"lines_per_epoch": 0, "pictures": False, "tensorboard": False, "wandb": None, "mlflow": None}
WORDS = {True: "holds", False: "DIFFERS", None: "not checked"}


def verify(config: VerifyConfig) -> None:
    """Print what holds of a run's proof; exit with code 1 if something differs."""
    folder = Path(config.run).resolve()
    proof = read_proof(folder)
    if not proof.get("finished"):
        raise TrainError(f"{folder} has not finished. fix: python train.py {option('resume', folder)}")
    if lacking := [entry for entry in ENTRIES if entry not in proof]:
        raise TrainError(f"{folder / FILE} has no entry {lacking[0]!r}. fix: restore it")
    start = proof["starts"][-1]
    world = init_distributed_mode(start["options"]["train"]["device"], start["options"]["train"]["timeout_seconds"])
    torch.set_num_threads(start["threads"])  # sums depend on it
    differs = []
    for check in checks(config, folder, proof, world):
        if world.is_main:
            say(f"{check.what:<14}{WORDS[check.holds]:<13}{check.detail}")
        differs += [check.what] * (check.holds is False)
    if world.is_main:
        say(f"differs: {', '.join(differs)}" if differs else "nothing differs")
    if max_over_ranks([bool(differs)])[0]:
        sys.exit(1)


def checks(config: VerifyConfig, folder: Path, proof: dict[str, Any], world: World) -> Iterator[Check]:
    """All checks, the quick ones first; only rank 0 gets results."""
    last = proof["starts"][-1]
    options = options_of(last, config)
    now = hardware(world)
    if world.is_main:
        yield from check_run(folder, proof, options_of(proof["starts"][0], config))
        yield from check_program(proof, options)
        yield judged("hardware", [f"{last['hardware']} -> {now}: bits may differ"] * (now != last["hardware"]), now)
    try:
        sets = dict(zip(("train", "val"), open_sets(options, world), strict=True))
    except USER_ERRORS as error:
        yield Check("data", False, f"{reason(error)}. fix: data_root=<its folder now>")
        return
    if world.is_main:
        yield from check_data(folder, proof, sets)
    if config.steps:
        place = broadcast_text(scratch_in(folder) if world.is_main else None)
        try:
            yield tried("last steps", lambda: last_steps(config, folder, proof, world, Path(place)))
        finally:
            if world.is_main:
                shutil.rmtree(place)
    if config.score:
        yield tried("figures", lambda: figures(options, folder, proof, world, sets["val"]))


def scratch_in(folder: Path) -> str:
    """A new folder in the run, which all nodes see; if that is read-only, one on this machine."""
    return tempfile.mkdtemp(prefix=".verify-", dir=folder if os.access(folder, os.W_OK) else None)


def tried(what: str, check: Callable[[], Check]) -> Check:
    """The result of ``check``, or the error that ends it."""
    try:
        return check()
    except USER_ERRORS as error:
        return Check(what, False, reason(error))


def last_steps(config: VerifyConfig, folder: Path, proof: dict[str, Any], world: World, place: Path) -> Check:
    """Resume from the checkpoint before the last one and train up to the last one, without output.

    Nothing is checked where the steps cannot be repeated to the last bit. Raises the errors of
    train.
    """
    until = proof["last steps"]["step"]
    start = [start for start in proof["starts"] if start["step"] < until][-1]  # a later one only scored
    if start["options"]["train"]["best_only"] or not {LAST, PREVIOUS} <= proof["files"].keys():
        return Check("last steps", None, "no checkpoint before them was kept")
    before, count = load_checkpoint(folder / PREVIOUS)["step"], start["processes"]
    if until - before > config.steps:
        return Check("last steps", None, f"they are {until - before}. fix: steps={until - before}")
    options = options_of(start, config, {"run_dir": None, "resume": str(place), "resume_force": True})
    anywhere = options.train.deterministic and not on_gpu(start)  # docs/machines/distributed.md
    if count != world.world_size and not anywhere:
        return Check("last steps", None, f"{count} processes trained them, {world.world_size} would round differently")
    if world.is_main:
        (place / LAST).parent.mkdir(parents=True)
        (place / LAST).symlink_to(folder / PREVIOUS)
    with redirect_stdout(StringIO()), StopRequest(until) as stop, warnings.catch_warnings(), ExitStack() as stack:
        train_until(options, stop, stack)
    same = not world.is_main or weights_digest(load_checkpoint(place / LAST)) == proof["last steps"]["sha256"]
    return judged("last steps", ["other weights"] * (not same), f"same weights after steps {before} to {until}")


def figures(config: TrainConfig, folder: Path, proof: dict[str, Any], world: World, val_set: Annotations) -> Check:
    """Score the best weights again."""
    prepare_numerics(config, world)
    state, known = load_checkpoint(folder / BEST), proof["figures"]
    model, _ = model_from_checkpoint(state)
    model.to(weights_dtype(config.train.precision.value)).load_state_dict(state["ema"])  # float64 was rounded
    size = config.evaluate.image_size or config.train.image_size
    evaluation = Evaluator(val_set, config.evaluate, size, model, config.data, world)(model.to(world.device))
    found = evaluation.scores.figures if evaluation is not None else known
    wrong = [f"{name}: {value} -> {found.get(name)}" for name, value in known.items() if found.get(name) != value]
    score = "without boxes, no AP" if known["AP"] == ABSENT else f"AP {known['AP']:.4f}"
    return judged("figures", wrong, f"all of epoch {proof['best epoch']}, {score}")


def options_of(start: dict[str, Any], config: VerifyConfig, changes: dict[str, Any] | None = None) -> TrainConfig:
    """The options of a start of the run, with today's paths and without logging services."""
    now = defaults("train", TrainConfig)
    options = with_missing(start["options"], now)
    plugins = config.plugins or options["plugins"]
    today = {"plugins": plugins, "plugins_sha256": {}, "logger": options["logger"] | QUIET}
    today["evaluate"] = options["evaluate"] | {"every": 0}
    today["data"] = options["data"] | ({"root": config.data_root} if config.data_root is not None else {})
    if not Path(options["data"]["index_dir"]).is_dir():  # of another machine
        today["data"]["index_dir"] = now["data"]["index_dir"]
    return from_dictionary(layered(options | today, changes or {}), TrainConfig)


def reason(error: Exception) -> str:
    """The message of an error, without its fix."""
    return str(error).partition(". fix:")[0]
