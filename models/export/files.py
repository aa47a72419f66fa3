"""Write a DetectorGraph to an .onnx or .pt2 file, and run such files on the CPU."""

import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.errors import ModelError
from models.export.graph import DetectorGraph

DynamicAxes = Mapping[int, str]  # image axis of variable size -> its name
Run = Callable[[Tensor], tuple[Tensor, ...]]  # images -> outputs

BOXES = ("boxes_xyxy", "scores")
DETECTIONS = ("boxes", "scores", "classes", "counts")
CANDIDATES = ("all_boxes_xyxy", "all_scores")  # inside an ONNX file: the suppression's input
METADATA_FILE = "metadata.json"  # inside a .pt2


def output_names(graph: DetectorGraph) -> tuple[str, ...]:
    """The names of the graph's outputs, in order."""
    names = BOXES if graph.suppression is None else DETECTIONS
    return (*names, *CANDIDATES) if graph.show_candidates else names


def write_onnx(
    graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes, opset: int, metadata: Mapping[str, str], path: Path
) -> None:
    """Write an ONNX file with one input, ``images``, and the graph's outputs under their names.

    The shapes are those of ``example`` except for the axes in ``dynamic``. Candidates that the
    graph shows are not outputs of the file, but run_onnx_with_candidates finds them inside. Raises
    ModelError if an exporter fails.
    """
    exported = _exported(graph, example, dynamic)
    with _quiet():
        try:
            program = torch.onnx.export(
                exported,
                dynamo=True,
                verbose=False,
                opset_version=opset,
                input_names=["images"],
                output_names=output_names(graph),
                dynamic_shapes={"images": dict(dynamic)} if dynamic else None,
                custom_translation_table={torch.ops.aten.sort.stable: _sort},
            )
        except torch.onnx.OnnxExporterError as error:
            raise ModelError(
                f"torch cannot write this network as ONNX with opset={opset} ({_root(error)})."
                " fix: format=torch; debug=true shows more"
            ) from error
        assert program is not None
        model = program.model
        if graph.show_candidates:
            del model.graph.outputs[-len(CANDIDATES) :]
        model.metadata_props.update(metadata)
        program.save(path, external_data=False)


def write_torch(
    graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes, metadata: Mapping[str, str], path: Path
) -> None:
    """Write a torch.export archive. Shapes as in write_onnx; metadata.json holds the metadata."""
    exported = _exported(graph, example, dynamic)
    exported.example_inputs = None  # a large batch would add hundreds of megabytes to the file
    # An open file, because torch stores the name of a path in the archive.
    with _quiet(), path.open("wb") as file:
        torch.export.save(exported, file, extra_files={METADATA_FILE: json.dumps(metadata)})


def run_onnx(path: Path) -> Run:
    """A function that runs a file of write_onnx in onnxruntime, after ONNX's checker passed it."""
    import onnx

    onnx.checker.check_model(str(path), full_check=True)
    return open_onnx(path)


def run_onnx_with_candidates(path: Path) -> Run:
    """A function that runs an ONNX file with suppression: images -> DETECTIONS and CANDIDATES."""
    import onnx

    proto = onnx.load(path)
    # The extractor needs the types of the values at which it cuts.
    types = (onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in CANDIDATES)
    proto.graph.value_info.extend(types)
    part = onnx.utils.Extractor(proto).extract_model(["images"], [*DETECTIONS, *CANDIDATES])
    return open_onnx(part.SerializeToString())


def run_torch(path: Path) -> Run:
    """A function that runs a torch.export archive."""
    import torchvision  # noqa: F401 - registers the suppression that the archive calls

    with _quiet():
        module: Any = torch.export.load(path).module()

    @torch.no_grad()
    def run(images: Tensor) -> tuple[Tensor, ...]:
        with _running(images):
            return tuple(module(images))

    return run


def _exported(graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes) -> torch.export.ExportedProgram:
    stride = graph.network.max_stride
    axes: dict[int, Any] = {
        axis: torch.export.Dim(name) if axis == 0 else stride * torch.export.Dim(f"{name}_in_strides")
        for axis, name in dynamic.items()
    }
    # Doubled along dynamic axes: the exporter treats a batch of 1, or a side of one stride, as
    # constant.
    example = example.repeat([2 if axis in dynamic else 1 for axis in range(example.ndim)])
    with _quiet():
        try:
            exported = torch.export.export(graph, (example,), dynamic_shapes={"images": axes or None})
        except torch._dynamo.exc.UserError as error:
            raise ModelError(
                f"torch cannot make {', '.join(dynamic.values())} of this network dynamic ({_root(error)})."
                " fix: dynamic_size=false; debug=true shows more"
            ) from error
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # it holds file names of this machine
    return exported


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
        with _running(images):
            return tuple(torch.from_numpy(output) for output in session.run(None, {"images": images.numpy()}))

    return run


def _sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """torch.sort(stable=True) for the ONNX exporter, which only supports the unstable one.

    ONNX defines its TopK to put the lower index first among equal values.
    """
    from onnxscript import opset18

    op: Any = opset18  # its annotations exclude symbolic values
    length = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, length, axis=dim, largest=int(descending), sorted=1)


def _root(error: BaseException) -> str:
    """The first sentence of the root cause of an error."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0].partition(". ")[0].rstrip(".")


@contextmanager
def _running(images: Tensor) -> Iterator[None]:
    """Raise errors inside a file as ModelError. Those of onnxruntime share only Exception."""
    try:
        yield
    except Exception as error:
        raise ModelError(
            f"the exported file fails on images {list(images.shape)} ({_root(error)})."
            " fix: another opset or format; debug=true shows more"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings about their internals, but not their errors."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
