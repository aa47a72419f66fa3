"""A callback may read all; what it changes is listed, and its exceptions are one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train_utils.small_training import CONFIG, network_with_norm, new_state
from train_utils.callbacks.callbacks import CALLBACKS, MOMENTS, WATCHED, Callbacks, Moment
from train_utils.distributed import World
from train_utils.errors import TrainError
from train_utils.optim import Schedule
from train_utils.run.run_state import RunState

ONE = World(0, 0, 1, 1, 0, 1, torch.device("cpu"), "none", "none")
STATES: list[RunState] = []


class Made:
    """A callback as a plugin registers it, with one function for all moments."""

    every_rank = False

    def __init__(self, function: Callable[[Moment], Any], *moments: str) -> None:
        self.methods = dict.fromkeys(moments, staticmethod(function))

    def __call__(self) -> Any:
        return type("Mine", (), self.methods)()


def called(
    function: Callable[[Moment], Any], folder: Path, moments: tuple[str, ...] = MOMENTS, steps: int = 1,
    world: World = ONE, every_rank: bool = False,
) -> list[str]:  # fmt: skip
    """What is said when each moment has come twice, ``step`` then ``steps`` times."""
    said: list[str] = []
    schedule = Schedule(CONFIG, 3, 12)
    state = new_state(network_with_norm(), schedule)
    schedule.apply(state.optimizer, 0)
    for weight in state.model.parameters():
        weight.grad = torch.ones_like(weight)
    state.optimizer.step()
    STATES[:] = [state]
    CALLBACKS["mine"] = Made(function, *moments)
    CALLBACKS["mine"].every_rank = every_rank
    try:
        callbacks = Callbacks(state, world, folder, 4, said.append)
        for _ in range(2):
            for moment in (*["step"] * (steps - 1), *MOMENTS):
                state.step += steps > 1
                callbacks.at(moment, {"loss": 1.0}, {"AP": 0.5})
    finally:
        del CALLBACKS["mine"]
    return said


def raised(error: BaseException, _: Moment) -> None:
    raise error


def first(moment: Moment) -> torch.nn.Parameter:
    return next(moment.model.parameters())


def optimiser_state(_: Moment) -> None:
    next(iter(STATES[0].optimizer.state.values()))["momentum_buffer"].mul_(2)


CHANGES: dict[str, tuple[Callable[[Moment], Any], str]] = {
    "in place": (lambda moment: first(moment).detach().mul_(1.5), "weights"),
    "past autograd": (lambda moment: first(moment).data[0].add_(1e-3), "weights"),
    "through numpy": (lambda moment: first(moment).detach().numpy().fill(0.5 + torch.initial_seed() % 2), "weights"),
    "statistics": (lambda moment: next(moment.model.buffers()).add_(1), "weights"),
    "average": (lambda moment: next(moment.average.parameters()).neg_(), "averaged weights"),
    "gradient": (lambda moment: first(moment).grad.mul_(2), "gradients"),
    "no gradient": (lambda moment: setattr(first(moment), "grad", None), "gradients"),
    "momentum": (optimiser_state, "optimiser state"),
    "dice": (lambda _: torch.rand(1), "random numbers"),
    "hook": (lambda moment: moment.model.register_forward_hook(lambda *_: None), "layers"),
    "hook before": (lambda moment: moment.model.register_forward_pre_hook(lambda *_: None), "layers"),
    "mode": (lambda moment: moment.model.train(not moment.model.training), "layers"),
    "frozen": (lambda moment: first(moment).requires_grad_(not first(moment).requires_grad), "layers"),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("moment", ["step", "end"])
def test_what_a_callback_changes_is_listed_once(change: str, moment: str, tmp_path: Path) -> None:
    function, what = CHANGES[change]
    said = called(function, tmp_path, (moment,))
    rows = json.loads((tmp_path / "touched.json").read_text())
    assert rows == [{"callback": "mine", "moment": moment, "what": what, "step": 0}]
    assert len(said) == 1 and f"callback mine changes {what} at the moment {moment}" in said[0]
    assert {of for _, of in CHANGES.values()} == set(WATCHED)


def test_the_first_step_that_changes_is_the_one_listed(tmp_path: Path) -> None:
    def late(moment: Moment) -> None:
        if moment.step >= 5:
            first(moment).detach().mul_(1.5)

    called(late, tmp_path, ("step",), steps=8)
    assert [row["step"] for row in json.loads((tmp_path / "touched.json").read_text())] == [5]


def test_a_resumed_run_keeps_its_list_and_does_not_say_it_again(tmp_path: Path) -> None:
    function, _ = CHANGES["in place"]
    assert len(called(function, tmp_path, ("step",))) == 1
    assert called(function, tmp_path, ("step",)) == []
    assert len(called(function, tmp_path, ("step", "end"))) == 1
    assert [row["moment"] for row in json.loads((tmp_path / "touched.json").read_text())] == ["step", "end"]


def test_off_rank_0_only_a_callback_of_every_rank_is_called_and_nothing_is_written(tmp_path: Path) -> None:
    function, rest = CHANGES["in place"][0], replace(ONE, rank=1)
    assert called(function, tmp_path, world=rest) == []
    assert len(called(function, tmp_path, world=rest, every_rank=True)) == len(MOMENTS)
    assert not list(tmp_path.iterdir())


def test_rank_0_hears_of_changes_on_another_rank_but_not_at_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def of_another(marks: list[int]) -> list[int]:
        asked.append(len(marks))
        return [1, *marks[1:]]

    monkeypatch.setattr("train_utils.callbacks.callbacks.max_over_ranks", of_another)
    assert len(called(lambda _: None, tmp_path, every_rank=True)) == 1
    assert len(asked) == 2 * (len(MOMENTS) - 1), "a step would wait for the others"


def test_a_callback_that_reads_leaves_no_trace(tmp_path: Path) -> None:
    seen: list[Moment] = []

    def read(moment: Moment) -> None:
        seen.append(moment)
        float(sum(weight.detach().sum() for weight in moment.model.parameters()))

    assert called(read, tmp_path) == [] and not list(tmp_path.iterdir())
    assert [moment.name for moment in seen] == [*MOMENTS, *MOMENTS]
    assert seen[0].losses == {"loss": 1.0} and seen[0].figures == {"AP": 0.5} and seen[0].epochs == 4


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"callback mine failed at the moment epoch \(ZeroDivisionError"):
        called(lambda _: 1 / 0, tmp_path, ("epoch",))
    for error in (ValueError("two\nlines"), SystemExit("two\nlines")):
        with pytest.raises(TrainError, match=r"at the moment step \((ValueError|SystemExit): two lines\). fix: "):
            called(partial(raised, error), tmp_path, ("step",))
    with pytest.raises(TrainError, match=r"callback mine has on_epoch: its methods .* fix: one of these"):
        called(print, tmp_path, ("epoch", "on_epoch"))
    with pytest.raises(TrainError, match="has no method"):
        called(print, tmp_path, ())
