"""Files of torch.save, read within limits, and which values can be those of a network."""

import re
import warnings
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError

MAX_ENTRIES, MAX_DEPTH = 1_000_000, 100  # of a file of torch.save; those of published networks have thousands
MOST = 1e6  # of a value, and its square of a variance: other bytes, read as float32, go up to 1e38
SAME_NETWORK = "fix: set model.cfg, model.width and model.box_bins as when the file was made"


def read_tensor_file(path: Path) -> Any:
    """Read a file of torch.save to the CPU, without running any code in it.

    Raises ModelError if the file is missing, damaged, or holds pickled objects, and OSError without
    the permission to read it.
    """
    if not path.is_file():
        raise ModelError(f"{path} is not a file. fix: set model.weights to a .weights or .pt file")
    path.open("rb").close()  # a file without read permission is not damaged
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch's, about classes of its own in old files
            # Memory-mapped, so that unused parts (an optimiser's state) stay on disk; torch cannot
            # map a file whose name is not Unicode.
            mapped = zipfile.is_zipfile(path) and str(path).encode("utf-8", "replace").decode() == str(path)
            content = torch.load(str(path), map_location="cpu", weights_only=True, mmap=mapped)
        return plain_content(content, path.stat().st_size)
    except Exception as error:  # damaged bytes can break any step of reading, with any error
        damaged = f"{path} is damaged, or torch.save did not write it. fix: download it again"
        raise ModelError(of_pickle(path, error) or damaged) from error


def of_pickle(path: Path, error: Exception) -> str | None:
    """The sentence for a file that torch refused for its pickled objects; None for other errors."""
    pickled = re.search(r"GLOBAL (\S+)", str(error))
    return pickled and (
        f"{path} holds pickled objects ({pickled[1]}), which are not read because that would run code in the file."
        " fix: in the system that wrote it, save the tensors alone: torch.save(model.state_dict(), 'weights.pt')"
    )


def plain_content(content: Any, file_bytes: int) -> Any:
    """What torch.load read from a file of that size, as plain dicts, lists, tuples and tensors.

    A forged file of a kilobyte may hold lists without end, tensors of gigabytes and objects with
    false attributes. Anything but text and numbers becomes the name of its type. Raises ValueError
    for more than MAX_ENTRIES, MAX_DEPTH or the bytes that a file of that size can have.
    """
    entries, room = MAX_ENTRIES, 4 * file_bytes + 2**20  # tensors may share their storage, as averages do

    def walk(value: Any, depth: int) -> Any:
        nonlocal entries, room
        entries -= 1
        if isinstance(value, Tensor):
            tensor = Tensor.detach(value)  # without attributes of its own
            if tensor.layout == torch.strided:  # others are refused where they are read
                room -= tensor.nbytes
                if tensor.device.type != "cpu" or tensor.nbytes > tensor.untyped_storage().nbytes():
                    raise ValueError("a tensor lacks values")
            value = tensor
        if min(entries, room, MAX_DEPTH - depth) < 0:
            raise ValueError("its content is too large for a file of its size")
        if isinstance(value, dict):
            return {key: walk(entry, depth + 1) for key, entry in dict.items(value)}
        if isinstance(value, list | tuple):
            kind = list if isinstance(value, list) else tuple
            return kind(walk(entry, depth + 1) for entry in value)
        return value if type(value) in (Tensor, str, int, float, bool, type(None)) else type(value).__name__

    return walk(content, 0)


def check_values(path: object, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise ModelError at the first of the named tensors whose values cannot be those of a network.

    They are not finite, not plain, variances below zero or beyond MOST. A Darknet file of another
    network with as many values looks like that.
    """
    for name, tensor in tensors:
        is_plain = tensor.layout == torch.strided and not tensor.is_quantized and not tensor.is_complex()
        if not is_plain or not tensor.float().isfinite().all():
            raise ModelError(f"{path}: {name} has values that are not finite or not plain. fix: use other weights")
        if not tensor.is_floating_point() or not tensor.numel():
            continue  # batch norm counts its steps
        least, most = tensor.float().aminmax()
        is_variance = name.endswith("running_var")
        if most > MOST ** (1 + is_variance) or least < (0 if is_variance else -MOST):
            what = "variances below zero" if is_variance and least < 0 else f"values beyond {MOST:g}"
            raise ModelError(f"{path}: {name} has {what}, so the file is of another network. {SAME_NETWORK}")
