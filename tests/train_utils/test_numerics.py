"""Number formats: what auto means, and float32 products on CUDA."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conf import TrainError
from conf.schema import Precision
from train_utils import numerics
from train_utils.numerics import autocast_dtype, common_precision, prepare_numerics

CPU, CUDA = map(torch.device, ("cpu", "cuda"))


def test_auto_is_what_the_hardware_multiplies_in_a_training_and_float32_in_an_evaluation(monkeypatch) -> None:
    monkeypatch.setattr(numerics, "has_native_bfloat16", lambda: True)
    chosen = {(8, 0): "bfloat16", (7, 5): "float16", (7, 0): "float16", (6, 1): "float32"}
    for capability, precision in chosen.items():
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, found=capability: found)
        assert common_precision(CUDA) == precision and common_precision(CPU) == "bfloat16"
        assert autocast_dtype("auto", CUDA) is autocast_dtype("auto", CPU) is None
    with pytest.raises(TrainError, match=r"^evaluate\.precision=tf32 needs a GPU.* fix: evaluate\.precision="):
        autocast_dtype("tf32", CPU, "evaluate.precision")


def test_a_training_allows_tf32_by_its_name_and_lets_cudnn_choose_where_that_helps() -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        for deterministic, rect, smallest, precision, benchmark in (
            (False, False, 1, Precision.float32, True),
            (True, False, 1, Precision.bfloat16, False),
            (False, True, 1, Precision.tf32, False),
            (False, False, 0.5, Precision.tf32, False),
        ):
            section: Any = SimpleNamespace(
                deterministic=deterministic, rect=rect, multi_scale=[smallest, 1], precision=precision, seed=0
            )
            prepare_numerics(section)
            assert cudnn.benchmark == benchmark and torch.is_deterministic_algorithms_warn_only_enabled()
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (precision is Precision.tf32,) * 2
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(False)
