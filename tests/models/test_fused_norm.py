"""Fused batch norm and activation against float64, in Triton's interpreter and for a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, which torch brings along on Linux, but for CPUs alone")

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel

from models import fused_norm
from tests.models import fused_norm_rank
from tests.models.fused_norm_rank import ALONE, MANY_VALUES, SHAPES, TOGETHER, Errors

RANK, REPOSITORY = Path(fused_norm_rank.__file__), Path(__file__).resolve().parents[2]
TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1e-3}  # of y and dx
EXACT = {dtype: min(tolerance, 1e-6) for dtype, tolerance in TOLERANCE.items()}  # of what is float32 or more


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Errors]:
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    commands = [[sys.executable, str(RANK), str(folder), str(rank)] for rank in range(2)]
    ranks = [subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        said = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(said)
    return {key: value for rank in (1, 0) for key, value in json.loads((folder / f"{rank}.json").read_text()).items()}


def assert_small(errors: Errors, dtype: torch.dtype) -> None:
    for name, error in errors.items():
        assert error <= (TOLERANCE if name in ("y", "dx") else EXACT)[dtype], name


@pytest.mark.release
@pytest.mark.parametrize(
    ("case", "dtype"),
    [(f"{name} {dtype}", dtype) for name, dtype in ALONE]
    + [(f"ranks {name} {dtype}", dtype) for name, dtype in TOGETHER],
)
def test_output_gradients_and_statistics_are_those_of_float64(measured, case, dtype) -> None:
    assert_small(measured[case], dtype)


@pytest.mark.release
@pytest.mark.parametrize(("mean", "dtype"), MANY_VALUES)
def test_a_million_values_cost_no_digits(measured: dict[str, Errors], mean: float, dtype: torch.dtype) -> None:
    """With a mean of 1e4 the spacing of float32 is a thousandth of the standard deviation."""
    errors = measured[f"{mean} {dtype}"]
    assert errors["mean"] <= 1e-7 and errors["variance"] <= max(2e-7, 1e-9 * mean)


@pytest.mark.release
def test_a_converted_network_trains_and_detects_as_before(measured: dict[str, Errors]) -> None:
    assert max(measured["network"].values()) <= 1e-12


@pytest.mark.release
def test_the_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter accepts what the compiler refuses."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"channels": "i32", "positions": "i32", "x": "*bf16", "y": "*bf16", "grad": "*bf16", "grad_x": "*bf16"}
    types |= dict.fromkeys(("weight", "bias", "moments", "run_mean", "run_var"), "*fp32")
    types |= {"sums": "*fp64", "partial": "*fp64"}
    constants: dict[str, Any] = {"high": 64, "wide": 64, "momentum": 0.03, "eps": 1e-6}
    once = [(fused_norm._statistics, 0.1), (fused_norm._follow, 0.1), (fused_norm._propagate, "silu")]
    by_kind = [(fused_norm._normalise, kind) for kind in (0.1, "silu", "mish")]
    by_kind += [(fused_norm._sum_gradients, kind) for kind in (0.1, "mish")]
    for kernel, kind in once + by_kind:
        given = {(kernel.arg_names.index(name),): value for name, value in (constants | {"activation": kind}).items()
                 if name in kernel.arg_names}  # fmt: skip
        source = ASTSource(kernel, {name: types.get(name, "constexpr") for name in kernel.arg_names}, given)
        made = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": fused_norm.WARPS})
        assert made.asm["ptx"], kernel.__name__


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(("name", "dtype"), ALONE)
def test_a_real_gpu_agrees_with_float64(name: str, dtype: torch.dtype) -> None:
    assert_small(fused_norm_rank.norm_errors(name, dtype, [(4, *SHAPES[0][1:])], "cuda"), dtype)
