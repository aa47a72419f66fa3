"""Ranks started differently are refused before the first step (also in test_faults.py)."""

from __future__ import annotations

import pytest

from train_utils.distributed import init_distributed_mode
from train_utils.run.same_start import difference, require_agreement


def test_equal_facts_and_a_single_process_agree() -> None:
    facts = {"train": {"seed": 0, "multi_scale": [0.5, 1.5]}, "names": ["a"], "none": None}
    assert (
        difference([facts, dict(facts), {**facts}]) is None and difference([facts]) is None and difference([]) is None
    )
    require_agreement(init_distributed_mode("cpu", 60), facts)


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ({"train": {"seed": 7, "lr": 0.1}}, "train.seed is 0 on rank 0 and 7 on rank 2"),
        ({"train": {"seed": 0}}, "train.lr is 0.1 on rank 0 and None on rank 2"),
        ({"train": {"seed": 0, "lr": 0.1}, "more": [1]}, "more is None on rank 0 and [1] on rank 2"),
        ({"train": {"seed": 0, "lr": "x" * 99}}, f"train.lr is 0.1 on rank 0 and {'x' * 60}... on rank 2"),
    ],
)
def test_the_first_difference_is_named_with_both_values(other: dict[str, object], sentence: str) -> None:
    facts = {"train": {"seed": 0, "lr": 0.1}}
    assert difference([facts, facts, other]) == sentence
