"""The networks that detect: Darknet as trained, or an exported ONNX file in its place."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from models.darknet import Darknet
from models.errors import ModelError
from models.heads import Head
from models.layers import Convolution
from models.onnx_metadata import Exported

Run = Callable[[Tensor], tuple[Tensor, ...]]  # images -> outputs


class OnnxNetwork(nn.Module):
    """A file of export.py that onnxruntime computes on the CPU; threads may share it.

    heads: none, as the file decodes its raw maps: models.decode passes its boxes and scores on.
    max_stride, num_classes, nearest_size: as of Darknet.
    """

    heads: Sequence[Head] = ()

    def __init__(self, exported: Exported) -> None:
        super().__init__()
        self.max_stride, self.num_classes = exported.stride, len(exported.names)
        self._batch_size = exported.batch_size
        # One thread for each call, so that any number of cores gives the same bits.
        self._run = open_onnx(exported.path, threads=1)

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the strides allow."""
        step = self.max_stride
        return max(step, round(height / step) * step), max(step, round(width / step) * step)

    def forward(self, images: Tensor) -> list[Tensor]:
        """All boxes_xyxy (B, n, 4) and scores (B, n, classes) of images as Darknet takes them.

        A file with a fixed batch size gets such batches, the last one filled up with black. Raises
        ModelError if the file fails on images of this size.
        """
        parts = []
        for part in images.split(self._batch_size or len(images)):
            missing = (self._batch_size or len(part)) - len(part)
            outputs = self._run(nn.functional.pad(part, (0, 0, 0, 0, 0, 0, 0, missing)))
            parts.append([output[: len(part)] for output in outputs])
        return [torch.cat(column) for column in zip(*parts, strict=True)]


def open_onnx(model: Path | bytes, threads: int = 0) -> Run:
    """A function that runs an ONNX file, or its bytes.

    It runs on the CPU with that many threads; 0: as many as there are cores.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(images: Tensor) -> tuple[Tensor, ...]:
        with running(images):
            return tuple(torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()}))

    return run


AnyNetwork = Darknet | OnnxNetwork
Network = TypeVar("Network", Darknet, OnnxNetwork, AnyNetwork)


def for_detection(model: Network, device: torch.device) -> Network:
    """``model`` as it detects fastest on the device that it is on.

    On a GPU that is a copy with batch norm in the convolutions, in channels_last memory. On a CPU
    it is the model itself, whose figures are kept to the last bit.
    """
    if device.type == "cpu":
        return model
    assert isinstance(model, Darknet), "an exported network runs on the CPU"
    return fuse_batch_norm(model).to(memory_format=torch.channels_last)


@torch.no_grad()
def fuse_batch_norm(model: Darknet) -> Darknet:
    """A copy with batch normalisation, in evaluation, folded into the convolutions.

    It is computed in float64, so that only the result is rounded. Binary (xnor) convolutions keep
    their batch normalisation.
    """
    fused = copy.deepcopy(model).eval()
    for layer in fused.layers:
        if isinstance(layer, Convolution) and layer.norm is not None and not layer.xnor:
            dtype = layer.conv.weight.dtype
            layer.conv = fuse_conv_bn_eval(layer.conv.double(), layer.norm.double()).to(dtype)
            layer.norm = None
    return fused


@contextmanager
def running(images: Tensor) -> Iterator[None]:
    """Raise errors inside a file as ModelError. Those of onnxruntime share only Exception."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"the exported file fails on images {list(images.shape)} ({root_cause(error)})."
            " fix: another format; debug=true shows more"
        ) from error


def root_cause(error: BaseException) -> str:
    """The first sentence of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")
