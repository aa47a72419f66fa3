"""What the machine is, and the most it can do: cores, clocks, matrix products, copies."""

from __future__ import annotations

import shutil
import subprocess

import cv2
import torch
import torchvision

from data.files.reading import usable_cores
from scripts.bench.gpu import Rows
from scripts.bench.on_gpu.common import Settings, seconds_each

PEAK = "bfloat16 matrix product"
CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,temperature.gpu"


def machine(settings: Settings, rows: Rows) -> None:
    """Names, versions, cores, clocks before and after work, peaks of arithmetic and memory."""
    rows.add("device", torch.cuda.get_device_name() if settings.device.type == "cuda" else "CPU")
    rows.add("versions", f"torch {torch.__version__}, torchvision {torchvision.__version__}, OpenCV {cv2.__version__}")
    rows.add("cores of this process", len(usable_cores()))
    rows.add("free in /dev/shm", shutil.disk_usage("/dev/shm").free / 2**30, "GiB")
    _clocks(rows, "idle")
    side = settings.matrix
    for name, dtype in ((PEAK, torch.bfloat16), ("float32 matrix product", torch.float32)):
        left, right = (torch.randn(side, side, device=settings.device, dtype=dtype) for _ in range(2))
        rows.add(name, 2 * side**3 / seconds_each(left.matmul, [right], settings) / 1e12, "TFLOP/s")
    source = torch.randn(8 * side * side, device=settings.device)
    target = torch.empty_like(source)
    seconds = seconds_each(target.copy_, [source], settings)
    rows.add("copy on the device, read and written", 2 * source.nbytes / seconds / 1e12, "TB/s")
    _clocks(rows, "after work")


def _clocks(rows: Rows, when: str) -> None:
    """What nvidia-smi reads; it changes nothing."""
    if shutil.which("nvidia-smi") is not None:
        query = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader", "--id=0"]
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=20)
        rows.add(f"{when}: SM clock, its maximum, memory, power, temperature", (done.stdout or done.stderr).strip())
