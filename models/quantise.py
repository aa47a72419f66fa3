"""Quantise an ONNX file of models/export.py to int8."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from models.export import quiet, run_onnx

LINEAR = ("LeakyRelu", "Relu")  # f(scale * x) = scale * f(x) for scales above 0
SMALLEST = 1e-3  # of the largest channel: dead ones would be scaled without limit


def quantise(path: Path, batches: Iterable[Tensor], symmetric: bool) -> None:
    """Quantise an ONNX file in place, all but the last convolutions and what follows them.

    Weights get a scale for each channel and 7 bits, because sums of two products of 8 bits overflow
    on processors without VNNI. Other values are uint8, or int8 around zero if ``symmetric``, with
    the ranges that they have on ``batches`` of images, float32 (batch, 3, height, width).
    """
    from onnxruntime import quantization

    images = list(batches)
    proto = equalise(path, images)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc]
        feeds = iter([{"images": batch.numpy()} for batch in images])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    makers = {name: node for node in proto.graph.node for name in node.output}
    in_float = set()
    waiting = [output.name for output in proto.graph.output]
    while waiting:  # from the outputs back to the first convolutions
        node = makers.get(waiting.pop())
        if node is not None and node.name not in in_float:
            in_float.add(node.name)
            waiting += node.input if node.op_type != "Conv" else ()
    types = quantization.QuantType
    with quiet():
        quantization.quantize_static(
            proto,
            path,
            Reader(),
            per_channel=True,
            reduce_range=True,
            nodes_to_exclude=sorted(in_float),
            activation_type=types.QInt8 if symmetric else types.QUInt8,
            weight_type=types.QInt8,
            extra_options={"ActivationSymmetric": symmetric},
        )


def equalise(path: Path, batches: Iterable[Tensor]) -> Any:
    """The content of an ONNX file, with channels between two convolutions scaled to a like range.

    The first convolution divides its channels and the second multiplies them again, which changes
    no result. The factor is the geometric mean of a channel's range on ``batches`` and of the
    inverse range of the weights that read it; with one filter for each channel, the former alone.
    Compare Nagel et al. 2019, Data-Free Quantization, who use weights on both sides.
    """
    import onnx
    from onnx import numpy_helper

    proto = onnx.load(path)
    pairs = neighbours(proto.graph)
    if not pairs:  # as in networks of SiLU
        return proto
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    run = run_onnx(path, [first.output[0] for first, _ in pairs])
    ranges = [np.zeros(1)] * len(pairs)
    for batch in batches:
        largest = (values.abs().amax((0, 2, 3)).numpy() for values in run(batch)[-len(pairs) :])
        ranges = list(map(np.maximum, ranges, largest))
    for (first, second), of_values in zip(pairs, ranges, strict=True):
        names = [first.input[1], first.input[2], second.input[1]]
        weights, bias, reading = (numpy_helper.to_array(stored[name]) for name in names)
        factors = of_values.clip(of_values.max() * SMALLEST)
        by_filter = reading.shape[1] == 1
        if not by_filter:
            of_weights = np.abs(reading).max((0, 2, 3))
            factors = np.sqrt(factors / of_weights.clip(of_weights.max() * SMALLEST))
        factors = (factors / np.exp(np.log(factors).mean())).astype(np.float32)
        by_row = factors.reshape(-1, 1, 1, 1)
        scaled = weights / by_row, bias / factors, reading * (by_row if by_filter else by_row.swapaxes(0, 1))
        for name, values in zip(names, scaled, strict=True):
            stored[name].CopyFrom(numpy_helper.from_array(values, name))
    return proto


def neighbours(graph: Any) -> list[tuple[Any, Any]]:
    """Pairs of convolutions of which the second alone reads the first, through LINEAR at most."""
    shapes = {tensor.name: list(tensor.dims) for tensor in graph.initializer}
    readers: dict[str, list[Any]] = {}
    for node in graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    pairs = []
    for first in graph.node:
        then = readers.get(first.output[0], [])
        if len(then) == 1 and then[0].op_type in LINEAR:
            then = readers.get(then[0].output[0], [])
        if first.op_type != "Conv" or len(then) != 1 or then[0].op_type != "Conv":
            continue
        second = then[0]
        values = [*first.input[1:], second.input[1]]
        if len(values) < 3 or any(name not in shapes or len(readers[name]) > 1 for name in values):
            continue
        filters, reading = shapes[values[0]][0], shapes[values[2]]
        if reading[1] == filters or reading[:2] == [filters, 1]:  # else a group reads several channels
            pairs.append((first, second))
    return pairs
