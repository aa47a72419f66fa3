"""Number formats and reproducibility of a run."""

import ctypes
import platform
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import numpy as np
import torch

from conf import TrainError
from conf.cli import launch
from conf.schema import Precision, TrainSection
from train_utils.distributed import max_over_ranks

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # parameters of mallopt(3)
CPU_INFO = Path("/proc/cpuinfo")
_CHANGING, _outside = Lock(), list[int]()  # number of threads outside, for each one_thread_per_operator
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Hardware that has one of them natively has those after it, too.
BY_SPEED = (Precision.bfloat16, Precision.float16, Precision.float32)


def common_precision(device: torch.device) -> Precision:
    """The fastest of BY_SPEED that the hardware of all ranks has; they call this together.

    bfloat16 counts where it is not emulated, float16 from compute capability 7.0 on.
    """
    own = Precision.float32
    if device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(device)
        if major >= 7:
            own = Precision.bfloat16 if major >= 8 else Precision.float16
    elif has_native_bfloat16():
        own = Precision.bfloat16
    return BY_SPEED[int(max_over_ranks(torch.tensor(BY_SPEED.index(own))))]


def autocast_dtype(precision: str, device: torch.device, key: str = "train.precision") -> torch.dtype | None:
    """The autocast dtype, or None, for the option ``key``; TrainError if the hardware lacks it."""
    if precision == "float16" and device.type == "cpu":
        raise TrainError(f"{key}=float16 needs a GPU", f"{key}=bfloat16 or float32")
    if precision == "tf32" and not (device.type == "cuda" and torch.cuda.is_tf32_supported()):
        raise TrainError(f"{key}=tf32 needs a GPU of compute capability 8.0 or later", f"{key}=float32")
    return DTYPES.get(precision)


def has_native_bfloat16() -> bool:
    """Whether the CPU multiplies bfloat16 matrices natively."""
    # torch reports it only from 2.15 on; Linux lists the processor's flags.
    listed = CPU_INFO.read_text().split() if CPU_INFO.exists() else []
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(listed)


def prepare_numerics(options: TrainSection) -> None:
    """Set seeds, determinism, TF32, benchmark and memory of a training, before CUDA computes."""
    random.seed(options.seed)
    np.random.seed(options.seed % 2**32)
    torch.manual_seed(options.seed)
    if options.deterministic:
        launch.fix_cublas_workspace()
    torch.use_deterministic_algorithms(options.deterministic, warn_only=True)
    torch.backends.cudnn.deterministic = options.deterministic
    # The benchmark picks algorithms by speed, and times them anew for each image size.
    one_size = not options.rect and options.multi_scale[0] == options.multi_scale[1]
    torch.backends.cudnn.benchmark = one_size and not options.deterministic
    # torch allows TF32, which has 11 bits of mantissa, in convolutions. Not by ``fp32_precision``:
    # torch refuses to read these flags after that, and cudnn.flags does.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = options.precision is Precision.tf32
    # glibc keeps freed memory: page faults would cost a CPU a third of a step.
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


@contextmanager
def one_thread_per_operator() -> Iterator[int]:
    """Run torch operators of this thread on one thread inside; yield the number outside of all."""
    with _CHANGING:
        threads = _outside[0] if _outside else torch.get_num_threads()
        _outside.append(threads)
        torch.set_num_threads(1)
    try:
        yield threads
    finally:
        with _CHANGING:
            _outside.pop()
            torch.set_num_threads(threads)


def keep_to_one_thread() -> None:
    """Run torch operators of this new thread of a pool on one thread, whatever others set later."""
    torch.get_num_threads()  # a new thread copies the process-wide count on its first call
    torch.set_num_threads(1)
