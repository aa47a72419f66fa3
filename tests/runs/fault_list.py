"""Faults to plant in one rank of a training: see tests/runs/planted_faults.py."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

SLOW_SECONDS = 0.15  # added to a step of some 0.05 s


@dataclass(frozen=True)
class Fault:
    """A fault and its place: ``plant`` runs in the process of ``rank`` before its training."""

    place: str
    rank: int
    plant: Callable[[], object]
    options: tuple[str, ...] = ()
    may_wait: float = 0.0  # seconds of a configured time-out before any rank can know
    goes_on: bool = False  # the training must end well


def strike(target: str, action: Callable[[], object], call: int = 1, noted: bool = True) -> None:
    """Patch a function or method ``target`` so that its ``call``-th call begins with ``action``.

    ``noted`` records that moment as the time of the fault.
    """
    calls = 0
    original = mock.patch(target, None)
    function, _ = original.get_original()

    def replaced(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == call:
            if noted:
                note()
            action()
        return function(*arguments, **named)

    mock.patch(target, replaced).start()


def note() -> None:
    """Record the time of the fault for the parent, from any process of the rank."""
    Path(os.environ["PLANTED_FAULT"]).touch()


def throw(error: BaseException) -> None:
    """``raise`` as a function."""
    raise error


def send(number: signal.Signals) -> None:
    """Send a signal to the calling process."""
    os.kill(os.getpid(), number)


def asked_twice() -> None:
    """Send two requests to stop at once."""
    send(signal.SIGUSR1)
    send(signal.SIGTERM)


def kill_worker() -> None:
    """Send SIGKILL to the newest child of this process, a loader worker."""
    os.kill(max(child.pid or 0 for child in multiprocessing.active_children()), signal.SIGKILL)


def no_space() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lose_numbers() -> None:
    """Make every loss of this rank NaN from the third call on."""
    from models import YoloLoss

    calls, compute = 0, YoloLoss.__call__

    def broken(self: YoloLoss, maps: list[torch.Tensor], *arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        return compute(self, [m * float("nan") for m in maps] if calls > 2 else maps, *arguments, **named)

    mock.patch("models.YoloLoss.__call__", broken).start()
    strike("train_utils.loop.nonfinite.NonFiniteGuard.skip", lambda: None)


def write_broken_json() -> None:
    """Damage the generated annotations as this process opens them."""
    from data.formats.shapes import ensure_shapes

    def damaged(*arguments: Any) -> Path:
        folder = ensure_shapes(*arguments)
        for path in (folder / "annotations").glob("*.json"):
            path.write_text(json.dumps(json.loads(path.read_text()))[:-40])
        note()
        return folder

    mock.patch("data.index.locate.ensure_shapes", damaged).start()


def fill_disk(names: Sequence[str]) -> None:
    """Make files of these names unwritable once the training has begun."""
    opened = open

    def refuse(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        path = Path(file) if isinstance(file, str | Path) else Path()  # pipes come by number
        if path.name in names and mode != "r" and path.with_name("config.yaml").exists():
            note()
            raise no_space()
        return opened(file, mode, *arguments, **named)

    mock.patch("pathlib.io.open", refuse).start()


def no_picture() -> None:
    """Make pictures unwritable."""

    def fail(*_: Any) -> bool:
        note()
        return False

    mock.patch("cv2.imwrite", fail).start()


def no_checkpoint(calls: int) -> None:
    """Make the disk full for the first ``calls`` checkpoints."""
    failed, save = 0, torch.save

    def refuse(*arguments: Any) -> None:
        nonlocal failed
        failed += 1
        if failed <= calls:
            note()
            raise no_space()
        save(*arguments)

    mock.patch("torch.save", refuse).start()


ITEMS, STEP = "data.samples.dataset.TrainDataset.__getitems__", "torch.optim.SGD.step"
BUILD, OPEN = "data.index.annotations.build_index", "data.index.annotations.load_index"
FORWARD, LOSS = "models.Darknet.forward", "models.YoloLoss.__call__"
WRITE, ROW = "train_utils.run.checkpoint_writer.save_checkpoint", "train_utils.run.log.MetricsCsv.write"
error, failed = partial(throw, ValueError("planted")), partial(throw, AssertionError("planted"))
no_memory = partial(throw, torch.OutOfMemoryError("planted: out of memory"))
full, interrupt = partial(throw, no_space()), partial(throw, KeyboardInterrupt())
asked = partial(send, signal.SIGUSR1)
killed, frozen = partial(send, signal.SIGKILL), partial(send, signal.SIGSTOP)

FAULTS = {
    "index-disk": Fault("disk full as the index is built", 0, partial(strike, "data.index.cache.np.save", full)),
    "index-bug": Fault("index of the data set is built", 0, partial(strike, BUILD, error)),
    "broken-json": Fault("annotations are read", 0, write_broken_json),
    "leader-killed": Fault("killed -9 as the index is built", 0, partial(strike, BUILD, killed)),
    "val-set": Fault("the val set is opened", 1, partial(strike, OPEN, error, call=2)),
    "beside-leader": Fault(
        "before a section in which rank 0 works for 8 s",
        1,
        partial(strike, "conf.build.batches.open_annotations", error),
    ),
    "worker": Fault("a worker reads a batch", 1, partial(strike, ITEMS, error, call=3)),
    "worker-killed": Fault("a worker is killed -9", 1, partial(strike, FORWARD, kill_worker, call=3)),
    "worker-hangs": Fault("a worker hangs", 1, partial(strike, ITEMS, frozen, call=3), may_wait=15),
    "first-batch": Fault("the first batch is read", 0, partial(strike, ITEMS, error), ("data.workers=0",)),
    "transfer": Fault("a batch goes to the device", 1, partial(strike, "data.samples.batch.Batch.to", error, call=3)),
    "forward": Fault("forward pass of step 3", 1, partial(strike, FORWARD, error, call=3)),
    "loss-0": Fault("assertion in the first loss", 0, partial(strike, LOSS, failed)),
    "loss-1": Fault("assertion in the loss of step 3", 1, partial(strike, LOSS, failed, call=3)),
    "backward": Fault("backward pass of step 3", 1, partial(strike, "torch.Tensor.backward", error, call=3)),
    "optimiser": Fault("optimiser step 3", 0, partial(strike, STEP, error, call=3)),
    "memory": Fault("out of memory in step 2", 1, partial(strike, FORWARD, no_memory, call=2)),
    "nan": Fault("NaN loss from step 3 on", 1, lose_numbers, ("train.max_nonfinite_steps=2",)),
    "evaluation": Fault("evaluation, in its threads", 1, partial(strike, "models.Postprocess.__call__", error)),
    "scoring": Fault("figures are computed", 0, partial(strike, "eval.score", error)),
    "full-disk-once": Fault("the disk is full for one checkpoint", 0, partial(no_checkpoint, 1), goes_on=True),
    "full-disk": Fault("the disk is full for all checkpoints", 0, partial(no_checkpoint, 1000)),
    "writer-bug": Fault("a checkpoint is written", 0, partial(strike, WRITE, error), ("train.epochs=4",)),
    "full-disk-log": Fault(
        "the disk is full for metrics.csv and train.log", 0, partial(fill_disk, ("metrics.csv", "train.log")),
        goes_on=True,
    ),
    "logger-bug": Fault("a row of metrics.csv is written", 0, partial(strike, ROW, error)),
    "picture": Fault("the picture of the first batch is written", 0, no_picture, ("logger.pictures=true",)),
    "killed-0": Fault("rank 0 is killed -9 in step 3", 0, partial(strike, FORWARD, killed, call=3)),
    "killed-1": Fault("rank 1 is killed -9 in step 3", 1, partial(strike, FORWARD, killed, call=3)),
    "stopped": Fault("rank 1 is stopped in step 3", 1, partial(strike, FORWARD, frozen, call=3), may_wait=15),
    "interrupt": Fault("KeyboardInterrupt in step 3", 1, partial(strike, FORWARD, interrupt, call=3)),
    "signal-index": Fault("SIGUSR1 as the index is built", 0, partial(strike, BUILD, asked), goes_on=True),
    "signal-first": Fault("SIGUSR1 in the first step", 1, partial(strike, FORWARD, asked), goes_on=True),
    "signal-evaluation": Fault(
        "SIGUSR1 in evaluation", 1, partial(strike, "models.Postprocess.__call__", asked), goes_on=True
    ),
    "signal-save": Fault("SIGUSR1 as a checkpoint is written", 0, partial(strike, WRITE, asked), goes_on=True),
    "signal-twice": Fault("USR1 and TERM in step 3", 1, partial(strike, FORWARD, asked_twice, call=3), goes_on=True),
    "system-exit": Fault("SystemExit in step 3", 1, partial(strike, FORWARD, partial(throw, SystemExit(3)), call=3)),
}  # fmt: skip
