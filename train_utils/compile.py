"""torch.compile for a training step: the batch's floats, the network and the loss, a graph each.

Sizes are static, so each image size of a multi-scale training has its graphs. Under DDP torch
splits the network's graph where DDP's buckets end, and the exchange of one bucket overlaps with the
rest of the backward pass. The module itself is not replaced: state dicts keep their names, and
copies of it, such as the weight average, are not compiled.

With CUDA graphs the results of a micro-batch lie in memory that the next one overwrites. Losses are
read before, and gradients that a later micro-batch adds to are copied out.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from conf import TrainError
from conf.cli import launch, run_files
from conf.schema import AUTO, TrainSection, is_installed
from data import Batch, both_sides
from data.progress import log
from models import Darknet, count_flops
from models.loss import HeadLoss, LossParts
from train_utils import distributed
from train_utils.distributed import World
from train_utils.numerics import autocast_dtype

CUDA_GRAPHS = "reduce-overhead"  # torch's name of the mode
INPUT_ONLY = "input"  # colours are a dozen kernels; as one they save a GPU some milliseconds a batch
TARGET_ROWS = 256  # targets are filled up to multiples of this, for few graphs of the loss
GRAPHS_OF_A_SIZE = 16  # at most: one for each multiple
# yolov3-spp at 640 pixels on an H100, torch 2.11: compiling its 76 convolutions takes 98 s, and an
# image, of 156.7 GFLOPs in the forward pass, then takes .75 ms less (343 and 461 images/s).
COMPILE_SECONDS = 98 / 76  # for each convolution
SAVED_SECONDS = 0.75e-3 / 156.7e9  # for each image and FLOP
# The same network, eager, with train.fused_norm: with 64, 32, 16 images in a micro-batch, 8e7, 4e7
# and 2e7 values in the mean map, a step is 1.34, 1.04 and .75 times as fast.
FUSED_VALUES = 6e7


def choose_mode(options: TrainSection, world: World) -> str:
    """A mode of torch.compile, "off", or INPUT_ONLY, for ``train.compile``.

    All ranks call this together. For ``auto`` it is the one to take if that ``pays_back``. A
    network with ``train.fused_norm`` is not compiled. Raises TrainError for options that it cannot
    go with.
    """
    mode: str = options.compile.value
    rect, fused = options.rect, fuses_norm(options, world)
    if mode == "auto":
        if world.device.type == "cpu" or distributed.any_rank(not can_generate_code()):
            return "off"
        return INPUT_ONLY if fused or rect or options.multi_scale[0] < options.multi_scale[1] else "default"
    if mode != "off" and fused:
        raise TrainError(
            f"train.fused_norm={options.fused_norm} takes the place of kernels that train.compile={mode} makes. "
            "fix: leave one of them out"
        )
    if mode != "off" and rect:
        raise TrainError(
            "train.rect=true gives hundreds of image sizes, and train.compile needs minutes for each. "
            "fix: train.compile=off or train.rect=false"
        )
    if mode == CUDA_GRAPHS and (world.device.type == "cpu" or world.world_size > 1):
        raise TrainError(
            f"train.compile={mode} is for one GPU and a process without a launcher such as torchrun. "
            "fix: train.compile=default"
        )
    return mode


def pays_back(network: Darknet, image_size: int | Sequence[int], images: int) -> bool:
    """Whether compiling saves at least twice the time that it takes.

    ``images`` are those on which one process trains, from the first epoch to the last, so that a
    resumed run decides as before. The condition, 261,000 images for yolov3-spp at 640 pixels, is

        images * SAVED_SECONDS * FLOPs >= 2 * COMPILE_SECONDS * convolutions
    """
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in network.modules())
    saved = images * SAVED_SECONDS * count_flops(network, both_sides(image_size))
    return saved >= 2 * COMPILE_SECONDS * convolutions


def fuses_norm(options: TrainSection, world: World, network: Darknet | None = None, images: int = 0) -> bool:
    """Whether ``train.fused_norm`` takes models/fused_norm.py in place of torch's kernels.

    ``auto`` does where one GPU has shown them faster: in half precision, without train.compile, for
    large maps. ``images`` are those that ``network`` sees at once; without them it does not. Raises
    TrainError for ``true`` where the kernels cannot run.
    """
    if options.fused_norm == AUTO and network is not None:
        is_alone = world.device.type != "cpu" and world.world_size == 1 and options.compile.value in ("auto", "off")
        if not is_alone or not can_generate_code() or autocast_dtype(options.precision.value, world.device) is None:
            return False
        size, layers = both_sides(options.image_size), zip(network.layers, network.shapes, strict=True)
        shapes = [shape for layer, shape in layers if getattr(layer, "norm", None) is not None]
        values = sum(shape.channels * math.prod(shape.size(size)) for shape in shapes)
        return bool(shapes) and images * values >= FUSED_VALUES * len(shapes)
    if options.fused_norm is not True:
        return False
    if world.device.type == "cpu" or not can_generate_code():
        raise TrainError("train.fused_norm=true needs a GPU, Triton and a C++ compiler. fix: train.fused_norm=false")
    return True


def can_generate_code() -> bool:
    """Whether Triton and a C++ compiler are there, of which torch.compile needs both for a GPU."""
    return is_installed("triton") and launch.compiler() is not None


ToInput = Callable[[Batch], Tensor]


def compile_step(
    network: torch.nn.Module,
    loss: HeadLoss,
    to_input: ToInput,
    mode: str,
    sizes: int,
    *,
    log_line: Callable[[str], object] = log.info,
) -> tuple["HeadLoss | CompiledLoss", ToInput]:
    """Compile ``network`` in place; return ``loss`` and ``to_input`` compiled, too.

    ``mode`` is as chosen by ``choose_mode``, and ``sizes`` the number of image sizes. Each is
    compiled in its first step, which ``log_line`` announces. With ``off`` all stays.
    """
    if mode == "off":
        return loss, to_input
    launch.keep_compiled(run_files.weights_folder() / "compiled")
    if mode == INPUT_ONLY:
        return loss, torch.compile(to_input, mode="default", dynamic=True, fullgraph=True)
    from torch._dynamo import config as limits  # slow

    graphs = sizes * GRAPHS_OF_A_SIZE
    limits.recompile_limit = max(limits.recompile_limit, graphs)
    limits.accumulated_recompile_limit = max(limits.accumulated_recompile_limit, graphs)
    network.compile(mode=mode, dynamic=False)
    compiled_input = torch.compile(to_input, mode=mode, dynamic=False, fullgraph=True)
    parameters, began = list(network.parameters()), list[float]()  # began: the first two micro-batches

    def begin_micro_batch(batch: Batch) -> Tensor:
        if len(began) < 2:
            began.append(time.perf_counter())
            waited = f"compiled: the first step took {began[-1] - began[0]:.0f} s"
            log_line(waited if len(began) == 2 else "compiling, about a minute, once for each image size")
        if mode == CUDA_GRAPHS:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone()
            # Without it torch takes each of the three graphs for the start of a new micro-batch.
            torch.compiler.cudagraph_mark_step_begin()
        return compiled_input(batch)

    return CompiledLoss(loss, mode), begin_micro_batch


class CompiledLoss:
    """A loss on targets filled up with rows of zeros, which count for nothing."""

    def __init__(self, loss: HeadLoss, mode: str) -> None:
        self._eager, self._is_prepared = loss, False
        self._sums = torch.compile(loss.sums, mode=mode, dynamic=False, fullgraph=True)

    def count_positives(self, targets: Tensor) -> Tensor:
        """As the loss that is compiled."""
        return self._eager.count_positives(targets)

    def sums(
        self,
        raw_maps: Sequence[Tensor],
        targets: Tensor,
        positives_per_image: Tensor,
        objectness_ratio: float,
        refines: bool = False,
    ) -> tuple[LossParts, Tensor]:
        """As the loss that is compiled, with a graph for each value of ``refines``."""
        if not self._is_prepared:  # what a loss caches for a device, such as anchors, must not enter its graph
            with torch.no_grad():
                self._eager.sums(raw_maps, targets, positives_per_image)
            self._is_prepared = True
        # A number would be a constant of the graph, and each step of the warm-up has another.
        ratio = torch.full((), objectness_ratio, device=targets.device)
        rows = max(1, math.ceil(len(targets) / TARGET_ROWS)) * TARGET_ROWS
        filled = torch.nn.functional.pad(targets, (0, 0, 0, rows - len(targets)))
        return self._sums(list(raw_maps), filled, positives_per_image, ratio, refines)
