"""Checkpoints with a right digest and wrong content end in one sentence, or do their work."""

import random
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf import compose
from conf.cli.from_checkpoint import complete_conversion, complete_from_checkpoint
from conf.cli.resume import resumed_options
from conf.schema import ConvertConfig, EvalConfig, TrainConfig
from data.errors import UserError
from models import network_of_checkpoint
from models.cfg import ModelError
from tests.models.cfg_writer import cfg, conv, head
from tests.small_run import small_run
from train import train
from train_utils import checkpoint, optim
from train_utils.build import build_model
from train_utils.distributed import World
from train_utils.inference.open_checkpoint import open_checkpoint
from train_utils.train_state import TrainState

MISSING = object()
WORLD = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "a.cfg").write_text(cfg(conv(8, 3, 32), head(0, 1)))
    own = "model=base", f"model.cfg={folder / 'a.cfg'}", "train.epochs=1", "train.batch_size=18"
    train(small_run(folder / "shapes", folder / "run", *own, f"optim={request.param}"))
    return folder / "run"


@cache
def composed(name: str, schema: type, *overrides: str) -> Any:
    return compose._composed(name, schema, overrides)


def read_options(name: str, schema: type, complete: compose.Complete) -> Callable[[Path], object]:
    more = ["out=x"] * (name == "convert")
    return lambda run: compose.to_plain(composed(name, schema, f"ckpt={run}", *more), schema, complete)


def start_from(run: Path) -> None:
    options = composed("train", TrainConfig, f"model.cfg={run.parent / 'a.cfg'}", f"model.weights={run}")
    build_model(compose.to_plain(options, TrainConfig).model, 5)


@cache
def given_again(run: Path) -> TrainConfig:
    return compose.from_dictionary(FIRST[str(run)]["config"] | {"resume": str(run), "run_dir": None}, TrainConfig)


def resume(run: Path) -> None:
    saved, _ = checkpoint.continue_from(run)
    assert saved is not None
    config = resumed_options(given_again(run), saved)
    model = network_of_checkpoint(saved["network"], run, saved["model"])
    schedule = optim.Schedule(config.optim, 1, 1)
    optimizer = optim.make_optimizer(model, config.optim)
    scaler = torch.amp.GradScaler("cpu", enabled=True)
    description = {key: FIRST[str(run)][key] for key in ("names", "data", "config")}
    average = optim.WeightAverage(model, schedule.ema_decay)
    state = TrainState(model, average, schedule, optimizer, scaler, description)
    state.resume(saved, run, WORLD)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    schedule.apply(optimizer, state.step)
    scaler.scale(torch.ones(1))
    scaler.unscale_(optimizer)
    optimizer.step()
    scaler.update()
    state.average.update()
    state.end_epoch()
    state.stop_reason(config.train, WORLD)
    state.best_sentence()
    state.record(cast(Any, SimpleNamespace(metrics={"AP": 0.5})))
    checkpoint.to_plain(state.to_plain())


NETWORK = set(checkpoint.NetworkState.__struct_fields__)
READERS: dict[str, tuple[Callable[[Path], object], set[str]]] = {  # and the entries that it reads
    "options of eval": (read_options("eval", EvalConfig, complete_from_checkpoint), {"config"}),
    "options of convert": (read_options("convert", ConvertConfig, complete_conversion), {"config"}),
    "ckpt": (lambda run: open_checkpoint(str(run)), NETWORK),
    "weights": (start_from, NETWORK - {"config"}),
    "resume": (resume, set()),  # all
}
EVERY = 150  # of how many cases one is tried, beside the missing entries; all (1) take minutes
FIRST: dict[str, Any] = {}


def entries(state: Any) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key in state if isinstance(state, dict) else range(len(state)):
        yield (key,), state[key]
        if isinstance(state[key], dict | list):
            yield from (((key, *rest), value) for rest, value in entries(state[key]))


def forgeries(value: Any) -> list[Any]:
    forged = [MISSING, None, "x", [], [1, "x"], {"x": 1}]
    if isinstance(value, torch.Tensor):
        return [*forged, torch.zeros(2, 3), torch.zeros(()), value.to(torch.complex64), value.flatten()[:0]]
    if type(value) in (int, float):
        return [*forged, -5, 2**70, 0.3, float("nan"), torch.zeros(2), True]
    return [*forged, value[:-1], value * 2, [value]] if isinstance(value, list) else [*forged, 7, -1]


def put(state: Any, keys: tuple[Any, ...], value: Any) -> Any:
    state = deepcopy(state)
    inner = state
    for key in keys[:-1]:
        inner = inner[key]
    if value is MISSING:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = value
    return state


@pytest.mark.release
@pytest.mark.parametrize(
    ("run", "reader"), [*(("sgd", reader) for reader in READERS), ("adamw", "resume")], indirect=["run"]
)
def test_a_forged_entry_is_one_sentence_or_without_harm(reader: str, run: Path) -> None:
    path = run / "checkpoints" / ("last.pt" if reader == "resume" else "best.pt")
    state = FIRST.setdefault(str(run), checkpoint.load_checkpoint(path))
    state["scaler"] = torch.amp.GradScaler("cpu", enabled=True).state_dict()  # as with float16
    (read, keys_read), wrong = READERS[reader], list[str]()
    read(run)
    cases = [
        (keys, forged)
        for keys, value in entries(state)
        if keys[0] in (keys_read or state)
        for forged in forgeries(value)
    ]
    try:
        lost = [case for case in cases if len(case[0]) == 1 and (case[1] is MISSING or type(case[1]) is str)]
        for keys, forged in lost + random.Random(0).sample(cases, len(cases) // EVERY):
            content = put(state, keys, forged)
            about = {"format": checkpoint.FORMAT, "version": checkpoint.VERSION}
            torch.save({**about, "state": content, "digest": checkpoint.digest_of(content)}, path)
            try:
                read(run)
            except (UserError, ModelError) as error:
                if not re.fullmatch(r"[^\n]{10,600}", str(error)):
                    wrong.append(f"{keys} {forged!r:.40}: {error}")
            except Exception as error:
                wrong.append(f"{keys} {forged!r:.40}: {type(error).__name__} {error}")
    finally:
        checkpoint.save_checkpoint(path, state)
    assert not wrong, "\n".join(wrong)
