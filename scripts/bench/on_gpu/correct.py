"""Whether this GPU computes what a CPU does, skips what it should, repeats itself, and explains."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from scripts.bench.gpu import Rows
from scripts.bench.on_gpu.common import Settings, make_step, new_loss, new_network, new_step, seconds_each, synthetic
from train_utils.distributed import init_distributed_mode, max_over_ranks, stack_over_ranks, sum_over_ranks
from train_utils.errors import TrainError
from train_utils.launch.environment import fix_cublas_workspace
from train_utils.loop.step import OptimiserStep, explain_out_of_memory
from train_utils.numerics import allow_tf32
from train_utils.parallel.wrap import convert_sync_batchnorm, wrap_model

ROOT = Path(__file__).resolve().parents[3]
HUGE_SCALE = 2.0**126  # of the loss: every gradient overflows


def correct(settings: Settings, rows: Rows) -> None:
    """Every check for itself: one that fails does not hide the others."""
    fix_cublas_workspace()  # for the last one; CUDA reads it once
    small = settings if settings.tiny else replace(settings, width=0.25, side=160, batches=(4, 8))
    checks: list[tuple[Callable[[Settings, Rows], None], Settings]] = [
        (float32, small), (skipping, small), (out_of_memory, small), (repeating, small),
    ]  # fmt: skip
    for check, sizes in checks:
        try:
            check(sizes, rows)
        except Exception as error:  # the table shall name it, whatever it is
            rows.add(check.__name__, f"FAILED: {type(error).__name__} {str(error)[:100]}")


def float32(settings: Settings, rows: Rows) -> None:
    """Maps, and gradients with fixed statistics, against those of float64 on the CPU."""
    allow_tf32(False)
    exact = new_network(settings).double().eval()
    here = deepcopy(exact).float().to(settings.device).to(memory_format=torch.channels_last)
    batch, found = synthetic(settings, settings.batches[0]), []
    for network, device, dtype in ((exact, torch.device("cpu"), torch.float64), (here, settings.device, torch.float32)):
        maps = network(batch.to(device).network_input().to(dtype))
        parts = new_loss(network)(
            maps, batch.targets.to(device), objectness_ratio=1.0, sum_over_ranks=sum_over_ranks, world_size=1
        )
        parts.total.backward()
        found.append((maps, [parameter.grad for parameter in network.parameters()]))
    for name, expected, ours in zip(("maps", "gradients"), *found, strict=True):
        worst = max(_relative(one, other) for one, other in zip(expected, ours, strict=True))
        rows.add(f"float32 {name} against float64 on the CPU", worst, "", "1e-4")


def _relative(expected: Tensor, found: Tensor) -> float:
    difference = found.detach().cpu().double() - expected.detach()
    return float(difference.abs().max() / expected.detach().abs().max().clamp(min=1e-12))


def skipping(settings: Settings, rows: Rows) -> None:
    """A step that overflows changes no bit and lowers the scale; the next one trains."""
    step = new_step(settings, "float16" if settings.device.type == "cuda" else "bfloat16")
    batch, before = synthetic(settings, 2), _bits(step)
    for scale, overflows in ((HUGE_SCALE, True), (64.0, False)):
        step.state.scaler = torch.amp.GradScaler(settings.device.type, init_scale=scale)
        make_step(step, batch)
        changed = not all(map(torch.equal, before, _bits(step)))
        lowered = step.state.scaler.get_scale() < scale
        name = "an overflow changes no bit and lowers the scale" if overflows else "the step after it trains"
        rows.add(f"float16: {name}", _yes(changed != overflows and lowered == overflows), "", "yes")


def repeating(settings: Settings, rows: Rows) -> None:
    """Two trainings with train.deterministic have the same bits."""
    runs = []
    for _ in range(2):
        step = new_step(settings, deterministic=True)
        for seed in (0, 1, 0):
            make_step(step, synthetic(settings, settings.batches[-1], seed=seed))
        runs.append(_bits(step))
    torch.use_deterministic_algorithms(False)
    rows.add("deterministic: two trainings have the same bits", _yes(all(map(torch.equal, *runs))), "", "yes")


def out_of_memory(settings: Settings, rows: Rows) -> None:
    """Too large an allocation becomes one sentence with its fix."""
    sentence = "none"
    try:
        with explain_out_of_memory(images=64, accumulate=1, world_size=1):
            torch.empty(2**50, device=settings.device)
    except TrainError as error:
        sentence = str(error)
    good = sentence.startswith("out of memory") and "fix: train.micro_batch_size=32" in sentence
    rows.add("out of memory is one sentence with its fix", _yes(good), "", "yes")


def _bits(step: OptimiserStep) -> list[Tensor]:
    modules = step.state.model, step.state.average.module
    return [tensor.clone() for module in modules for tensor in module.state_dict().values()]


def _yes(good: bool) -> str:
    return "yes" if good else "NO"


def one_rank(settings: Settings, rows: Rows) -> None:
    """Collectives, and a step wrapped as for two ranks, in a group of one: all but the wires."""
    backend = "cpu:gloo,cuda:nccl" if settings.device.type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(  # noqa: TID251 - the program opens none for one rank
            backend, init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        world = init_distributed_mode(settings.device.type, 60)
        numbers = torch.arange(2048.0, device=settings.device)
        good = sum_over_ranks(numbers).equal(numbers) and stack_over_ranks(numbers)[0].equal(numbers)
        rows.add(f"{world.backend}: sums and stacks are right", _yes(good and max_over_ranks([3]) == [3]), "", "yes")
        seconds = seconds_each(sum_over_ranks, [numbers], replace(settings, steps=50))
        rows.add(f"{world.backend}: a sum of 2,048 numbers", 1e6 * seconds, "us")
        batch, losses = synthetic(settings, settings.batches[0]), []
        for ranks in (1, 2):
            step, wrapped = new_step(settings), replace(world, world_size=ranks)
            convert_sync_batchnorm(step.state.model, wrapped)
            step.model = wrap_model(step.state.model, wrapped)
            seconds = seconds_each(partial(make_step, step), [batch], settings)
            losses.append(step.losses["loss"])
            name = "plain" if ranks == 1 else "with DDP and batch norm over ranks"
            rows.add(f"{name}, batch {settings.batches[0]}", settings.batches[0] / seconds, "images/s")
        rows.add("loss with DDP against plain", 100 * abs(losses[1] / losses[0] - 1), "%", "2 %")
        torch.distributed.destroy_process_group()  # noqa: TID251 - see above


def marked_tests(settings: Settings, rows: Rows) -> None:
    """The suite's tests with the marker gpu, where pytest is."""
    if settings.device.type == "cpu" or find_spec("pytest") is None:
        rows.add("tests marked gpu", "no GPU or no pytest")
        return
    files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if "pytest.mark.gpu" in path.read_text()]
    how = ["-q", "-m", "gpu", "-o", "addopts=--import-mode=importlib", "--continue-on-collection-errors"]
    command = [sys.executable, "-m", "pytest", *how, *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    lines = (done.stdout + done.stderr).splitlines()
    rows.add("tests marked gpu", lines[-1] if lines else "", "", "all passed")
    for line in lines:
        if line.startswith(("FAILED", "ERROR")):
            rows.add(f"  {line[:110]}", "FAILED")
