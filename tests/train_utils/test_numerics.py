"""The number format of float32 products on CUDA."""

from types import SimpleNamespace
from typing import Any

import torch

from conf.train_options import Precision
from train_utils.numerics import prepare_numerics


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
            assert cudnn.benchmark == benchmark
            assert (matmul.allow_tf32, cudnn.allow_tf32) == (precision is Precision.tf32,) * 2
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before
        torch.use_deterministic_algorithms(False)
