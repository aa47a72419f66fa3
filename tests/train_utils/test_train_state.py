"""What a resumed run restores and reports about its options; tests/test_train.py has whole runs."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from conf import CheckpointError
from conf.schema import Optimizer
from tests.train_utils.small_training import CONFIG, WORLD, batches, network_with_norm, new_state, tensors, train_epoch
from train_utils.checkpoint import to_plain
from train_utils.coco_eval import ABSENT
from train_utils.optim import Schedule
from train_utils.train_state import TrainState

SCHEDULE = Schedule(CONFIG, steps_per_epoch=3, total_steps=12)
ADAMW = replace(SCHEDULE, config=replace(CONFIG, name=Optimizer.adamw))


def evaluated(score: float) -> Any:
    return SimpleNamespace(metrics={"AP": score})


@pytest.mark.parametrize(
    ("scores", "best", "best_epoch"),
    [
        ([0.2, 0.3, 0.3], 0.3, 2),  # of equal ones the first stays: its checkpoint is written
        ([0.0, 0.0], 0.0, 1),
        ([0.3, None, 0.2], 0.3, 1),  # an epoch without evaluation
        ([ABSENT, ABSENT], ABSENT, 2),  # without boxes in the validation set the latest weights are the best
    ],
)
def test_the_best_epoch_and_ties(scores: list[float | None], best: float, best_epoch: int) -> None:
    state, options = new_state(network_with_norm(), SCHEDULE), SimpleNamespace(epochs=9, patience=1)
    for number, score in enumerate(scores, start=1):
        state.end_epoch()
        is_best = state.record(evaluated(score) if score is not None else None)
        assert is_best == (state.best_epoch == number)
        waits = state.stop_reason(cast(Any, options), WORLD) is not None
        assert waits == (score is not None and not is_best), "patience counts evaluated epochs"
    assert (state.best, state.best_epoch) == (best, best_epoch)


def trained_and_saved(schedule: Schedule = SCHEDULE) -> tuple[TrainState, dict[str, Any]]:
    """A state after an epoch and a step, and what a file of it gives back."""
    state = new_state(network_with_norm(), schedule, 8.0)
    train_epoch(state, batches(8, 24))
    state.end_epoch()
    state.record(evaluated(0.5))
    train_epoch(state, batches(8, 8))
    saved = state.to_plain()
    assert saved is not None
    copy: dict[str, Any] = to_plain(saved, copied=True)
    return state, copy


@pytest.mark.parametrize(("schedule", "kept"), [(SCHEDULE, 1), (ADAMW, 3)])
def test_what_is_taken_up_has_the_values_and_the_memory_layout_of_before(schedule: Schedule, kept: int) -> None:
    """``kept``: momentum for each of 5 parameters; AdamW has two means and the number of steps."""
    state, saved = trained_and_saved(schedule)
    resumed = new_state(network_with_norm(), schedule, 2.0)
    saved["optimizer"]["param_groups"][0]["maximize"] = True  # a run's options decide, not its file
    resumed.resume(saved, Path("run"), WORLD)
    names = "epoch step seen best best_epoch best_metrics evaluated_epoch loss_steps lr".split()
    ours, theirs = ([getattr(each, name) for name in names] for each in (state, resumed))
    assert ours == theirs == [1, 4, 32, 0.5, 1, {"AP": 0.5}, 1, 1, state.lr]
    assert resumed.average.updates == 4 and resumed.scaler.get_scale() == 8
    assert torch.equal(resumed.loss_sums, state.loss_sums) and state.loss_sums.all()
    for _ in range(2):  # at once, and after both went on
        pairs = list(zip(tensors(state), tensors(resumed), strict=True))
        assert len(pairs) == 2 * 8 + 5 * kept and any(not one.is_contiguous() for one, _ in pairs)
        for one, other in pairs:
            assert torch.equal(one, other) and one.stride() == other.stride()
        for each in (state, resumed):
            train_epoch(each, batches(8, 24))


def test_a_momentum_of_another_shape_is_refused() -> None:
    _, saved = trained_and_saved()
    saved["optimizer"]["state"][0]["momentum_buffer"] = torch.zeros(2, 3)
    with pytest.raises(CheckpointError, match=r"momentum_buffer .* has the shape .* fix: "):
        new_state(network_with_norm(), SCHEDULE, 8.0).resume(saved, Path("run"), WORLD)


def test_the_best_epoch_is_chosen_anew_on_another_validation_set() -> None:
    _, saved = trained_and_saved()
    options = cast(Any, SimpleNamespace(epochs=9, patience=1))
    for before, is_other in (({"val": {"digest": "a"}}, True), ({"val": {"digest": "b"}}, False), ({}, False)):
        state = new_state(network_with_norm(), SCHEDULE)
        state.description["val"] = {"digest": "b"}
        said = state.resume(saved | before, Path("run"), WORLD)
        assert ("the validation set is another one" in said) == is_other
        assert "best AP 0.5000 after epoch 1" in said
        assert state.stop_reason(options, WORLD) is None
        state.end_epoch()
        assert state.record(evaluated(0.3)) == is_other
        assert (state.stop_reason(options, WORLD) is None) == is_other


def test_each_rank_gets_its_own_generators_back(monkeypatch: pytest.MonkeyPatch) -> None:
    on_device = [torch.tensor([7, 8], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: on_device[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: on_device.__setitem__(0, state))
    _, saved = trained_and_saved()
    drawn = torch.rand(3)
    saved |= {
        "world_size": 2,
        "loss_sums": torch.cat((saved["loss_sums"] * 3, saved["loss_sums"])),
        "rng": [torch.Generator().manual_seed(9).get_state(), saved["rng"][0]],
        "cuda_rng": [torch.tensor([9, 9], dtype=torch.uint8), saved["cuda_rng"][0]],
    }
    on_device[0] = torch.tensor([1, 2], dtype=torch.uint8)
    resumed = new_state(network_with_norm(), SCHEDULE)
    resumed.resume(saved, Path("run"), replace(WORLD, rank=1, world_size=2))
    assert on_device[0].tolist() == [7, 8] and torch.equal(torch.rand(3), drawn)
    assert torch.equal(resumed.loss_sums, saved["loss_sums"][1])
    resumed.resume(saved, Path("run"), WORLD)  # alone: the mean of both, and the first one's generators
    assert on_device[0].tolist() == [9, 9] and torch.initial_seed() == 9
    assert torch.equal(resumed.loss_sums, saved["loss_sums"][1] * 2)
