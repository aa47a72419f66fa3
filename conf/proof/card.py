"""Write the proof of a run: begin it at each start, complete it when the training is over."""

from __future__ import annotations

import csv
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

from conf.build.report import spare, summary_of
from conf.proof.facts import code_of, commit_of, hardware, initial_weights, listed, on_gpu, packages, start_facts
from conf.schema import TrainConfig
from data import Annotations
from data.index.hashes import hash_file, hash_set
from data.licences import LICENCES
from train_utils.distributed import World
from train_utils.pictures.plots import Say
from train_utils.report.proof import BEST, FILE, LAST, PREVIOUS, TABLE, UNKNOWN, read_proof, write_proof
from train_utils.run.plain_data import digest_of, to_plain
from train_utils.run.run_state import RunState
from train_utils.run.same_training import changed_values
from train_utils.run.whole_files import whole_file

STEPS = 8  # how many of the last steps can be replayed


def weights_digest(state: Mapping[str, Any]) -> str:
    """A SHA-256 over the tensors of the raw and the averaged weights, with names and shapes."""
    return digest_of(to_plain({key: dict(state[key]) for key in ("model", "ema")}))


def extra_checkpoint(config: TrainConfig, steps_per_epoch: int) -> int:
    """The step at which a run keeps a checkpoint to replay its end from; 0 for none.

    Where an epoch has no more than STEPS steps, the checkpoint of the epoch before is used.
    """
    extra = steps_per_epoch > STEPS and not config.train.best_only
    return config.train.epochs * steps_per_epoch - STEPS if extra else 0


class ProofCard:
    """Keeps ``proof.json`` on rank 0.

    A thread hashes the images while the training runs. A failure is only logged, because a training
    does not need its proof.
    """

    def __init__(
        self, folder: Path, config: TrainConfig, world: World, sets: dict[str, Annotations], state: RunState, say: Say
    ) -> None:
        """``config`` has the options as given."""
        self.folder, self.config, self.world, self.sets, self.state, self.say = folder, config, world, sets, state, say
        self.proof: dict[str, Any] = {}

    def begin(self) -> None:
        """Record this start. All ranks call this together, but not for a finished run."""
        devices = hardware(self.world)
        if self.world.is_main:
            spare(self.say, FILE, lambda: self._begin(devices))

    def _begin(self, devices: str) -> None:
        step = self.state.step
        start = start_facts(self.config, self.world, devices, step)
        before = read_proof(self.folder) if step and (self.folder / FILE).is_file() else {}
        self.proof = {
            "finished": False,
            "starts": [*before.get("starts", ()), start],
            "initial weights": before["initial weights"] if before else initial_weights(self.config),
            "licence of the data": LICENCES.get(self.config.data.name, UNKNOWN),
            "data": {name: summary_of(part) for name, part in self.sets.items()},
            "code": code_of(self.config),
            "packages": packages(),
        }
        self._hashes = Future[dict[str, Any]]()
        threading.Thread(target=self._hash_sets, name="proof", daemon=True).start()
        write_proof(self.folder, self.proof)

    def _hash_sets(self) -> None:
        try:
            self._hashes.set_result({name: hash_set(part) for name, part in self.sets.items()})
        except Exception as error:  # raised in finish
            self._hashes.set_exception(error)

    def finish(self) -> None:
        """Complete the proof with the figures and the digests of data, checkpoints and tables."""
        if self.proof:
            spare(self.say, FILE, self._finish)

    def _finish(self) -> None:
        if not self._hashes.done():
            self.say(f"{FILE}: the images are still being hashed")
        state, hashes = self.state, self._hashes.result()
        weights = {"model": state.model.state_dict(), "ema": state.average.module.state_dict()}
        with whole_file(self.folder / TABLE) as file:
            table = csv.writer(file)
            table.writerow(("set", "file", "sha256", "labels"))
            table.writerows((name, *row) for name, (rows, _) in hashes.items() for row in rows)
        for name, (_, whole) in hashes.items():
            self.proof["data"][name]["sha256"] = whole
        there = [name for name in ("metrics.csv", TABLE, BEST, LAST, PREVIOUS) if (self.folder / name).is_file()]
        self.proof |= {
            "finished": True,
            "last steps": {"step": state.step, "sha256": weights_digest(weights)},
            "best epoch": state.best_epoch,
            "figures": state.best_figures,
            "files": {name: hash_file(self.folder / name) for name in there},
        }
        log = (self.folder / "train.log").read_text(encoding="utf-8", errors="replace")
        self.proof["weaknesses"] = list(dict.fromkeys(weaknesses(self.proof, log)))
        write_proof(self.folder, self.proof)


def weaknesses(proof: Mapping[str, Any], log: str) -> Iterator[str]:
    """What makes a replay differ or impossible; ``log`` is the text of train.log."""
    starts, options = proof["starts"], proof["starts"][-1]["options"]["train"]
    if starts[0]["step"]:
        yield f"an earlier version, which kept no proof, made the first {starts[0]['step']} steps"
    if options["best_only"]:
        yield "train.best_only=true kept no checkpoint before the last steps to replay them from"
    if not options["deterministic"]:
        cpu, gpu = "another number of processes rounds differently", "a GPU may add in another order each time"
        yield f"train.deterministic=false: {gpu if on_gpu(starts[-1]) else cpu}"
    yield from (
        line.partition("warning: ")[2] for line in log.splitlines() if "warning: " in line and "deterministic" in line
    )
    for start in starts:
        if (commit := commit_of(start)) == UNKNOWN or "changes" in commit:
            yield f"from step {start['step']} on the code is that of no commit (commit {commit}): it has hashes only"
    for before, now in pairwise(starts):
        for key in ("code", "packages", "hardware", "processes"):
            if before[key] != now[key]:
                values = f" ({before[key]} -> {now[key]})" if key in ("hardware", "processes") else ""
                yield f"resumed at step {now['step']} with other {key}{values}"
        if changed := changed_values(before["options"], now["options"]):
            shown = listed([f"{key}: {change}" for key, change in changed.items()])
            yield f"resumed at step {now['step']} with other options ({shown})"
