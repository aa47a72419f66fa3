"""The number format of float32 products on CUDA: what is set, and what a GPU makes of it."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d

from train_utils.config import Precision
from train_utils.numerics import allow_tf32, prepare_numerics


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    yield
    matmul.allow_tf32, cudnn.allow_tf32 = before


def is_allowed() -> tuple[bool, bool]:
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize(
    ("deterministic", "rect", "multi_scale", "precision", "benchmark"),
    [
        (False, False, [1, 1], Precision.float32, True),
        (True, False, [1, 1], Precision.bfloat16, False),
        (False, True, [1, 1], Precision.tf32, False),
        (False, False, [0.5, 1], Precision.tf32, False),
    ],
)
def test_a_training_allows_tf32_by_its_name_and_lets_cudnn_choose_where_that_helps(
    deterministic: bool, rect: bool, multi_scale: list[float], precision: Precision, benchmark: bool
) -> None:
    section: Any = SimpleNamespace(
        deterministic=deterministic, rect=rect, multi_scale=multi_scale, precision=precision, seed=0
    )
    prepare_numerics(section)
    torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark == benchmark and is_allowed() == ((precision is Precision.tf32),) * 2


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_a_convolution_in_float32_has_all_its_digits_unless_tf32_is_allowed(allowed: bool) -> None:
    if not torch.cuda.is_available() or not torch.cuda.is_tf32_supported():
        pytest.skip("no CUDA device with TF32")
    allow_tf32(allowed)
    generator = torch.Generator().manual_seed(1)
    images, kernels = (torch.randn(shape, generator=generator) for shape in ((4, 64, 32, 32), (64, 64, 3, 3)))
    found = conv2d(images.cuda(), kernels.cuda()).cpu().double()
    exact = conv2d(images.double(), kernels.double())
    error = float((found - exact).norm() / exact.norm())
    assert (1e-5 < error < 1e-2) if allowed else error < 2e-6, error
