"""Export a detector to ONNX, OpenVINO or torch.export, and compare such files with the network.

A DetectorGraph is the fused network, its decoding and, optionally, suppression. Exporters demand
fixed shapes, so detections have room for the maximum, with zeros after the last of an image.
"""

import io
import json
import logging
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from models.cfg import ModelError, regular
from models.darknet import Darknet, fuse_batch_norm
from models.decode import NOT_FINITE, decode

CLIP_SIDES = 4  # image sides beyond the edges; boxes far larger would cost all others their precision
TOLERANCE = 1e-4  # for scores, and for corners as a share of the image
Outputs = tuple[Tensor, ...]
Run = Callable[[Tensor], Outputs]  # of images
DynamicAxes = Mapping[int, str]  # names by image axis of variable size
BOXES = ("boxes_xyxy", "scores")
DETECTIONS = ("boxes", "scores", "classes", "counts")
CANDIDATES = ("all_boxes_xyxy", "all_scores")  # inside an ONNX file: the suppression's input
METADATA_FILE = "metadata.json"  # inside a .pt2
RT_INFO = "detector"  # the part of an OpenVINO file that holds the metadata


@dataclass(frozen=True)
class FixedSuppression:
    """Postprocess without multi_label, with outputs that have room for max_detections.

    Boxes are clipped CLIP_SIDES image sides outside the image and offset by class and image, which
    rounds corners: by up to 1e-6 of the image side with 80 classes, and 1e-5 in a batch of 64.
    """

    confidence: float
    nms_iou: float
    max_detections: int
    candidates: int  # the boxes that enter it, at most

    def __call__(self, boxes_xyxy: Tensor, scores: Tensor, side: int) -> Outputs:
        """Detections of each image, best first; rows beyond its count are zero.

        boxes_xyxy: (batch, n, 4) in pixels; scores: (batch, n, classes); side: the longer side of
        the image in pixels. Returns boxes_xyxy (batch, max_detections, 4), scores (batch,
        max_detections), classes int64 (batch, max_detections) and counts int64 (batch,).
        """
        best, best_classes = scores.max(-1)
        # Zeros after the last box, so that there are enough candidates at any image size.
        values, order = _best_first(nn.functional.pad(best, (0, self.candidates)), self.candidates)
        order = order.clamp(max=best.shape[1] - 1)
        boxes = _rows(boxes_xyxy, order)
        classes = best_classes.gather(1, order)
        survives = self._survivors(boxes, values, classes, scores.shape[-1], side)
        values, place = _best_first(torch.where(survives, values, 0.0), self.max_detections)
        exists = values > 0
        boxes = torch.where(exists[..., None], _rows(boxes, place), 0.0)
        return boxes, values, torch.where(exists, classes.gather(1, place), 0), exists.sum(1)

    def _survivors(self, boxes: Tensor, values: Tensor, classes: Tensor, num_classes: int, side: int) -> Tensor:
        """Which candidates (batch, candidates) survive one run over all images and classes.

        Each pair has a cell in a square grid: in a single row float32 would round whole pixels.
        """
        from torchvision.ops import nms  # slow to import

        images = torch.arange(values.shape[0], device=values.device)[:, None]
        cells = images * num_classes + classes
        columns = (cells.max() + 1).float().sqrt().ceil().long()
        corners = torch.stack((cells % columns, cells // columns), -1)
        enough = (values > self.confidence)[..., None]
        cut = torch.where(enough, boxes.clamp(-CLIP_SIDES * side, (CLIP_SIDES + 1) * side), 0.0)
        low = cut.min()
        moved = cut + torch.cat((corners, corners), -1) * (cut.max() - low + 1)
        # Time grows with the survivors, so boxes that score too low go to one place outside the
        # grid, where one suppresses all others. That place and a second one always hold a box,
        # because torch.export assumes that two boxes survive, and its program fails with fewer.
        places = low + boxes.new_tensor(((-2.0, -2.0, -1.0, -1.0), (-4.0, -4.0, -3.0, -3.0)))
        moved = torch.cat((torch.where(enough, moved, places[0]).flatten(0, 1), places))
        survivors = nms(moved, nn.functional.pad(values.flatten(), (0, len(places))), self.nms_iou)
        # The number of survivors is not known in advance, so they mark a tensor of known size.
        survives = torch.zeros_like(moved[:, 0], dtype=torch.bool)
        survives[survivors] = True
        return survives[: -len(places)].view_as(values) & enough.squeeze(-1)


class DetectorGraph(nn.Module):
    """A fused copy of a network, its decoding and, if given, `suppression`."""

    def __init__(
        self, model: Darknet, suppression: FixedSuppression | None, show_candidates: bool = False, half: bool = False
    ) -> None:
        super().__init__()
        self.network = fuse_batch_norm(model).to(torch.float16 if half else None)
        self.suppression = suppression
        self.show_candidates = show_candidates and suppression is not None
        self.eval()
        self.requires_grad_(False)

    def forward(self, images: Tensor) -> Outputs:
        """Results of images, float32 (batch, 3, height, width), RGB in 0..1.

        Without suppression they are all boxes_xyxy (batch, n, 4) and scores (batch, n, classes), as
        decode gives them; else what FixedSuppression returns and, if `show_candidates`, then those.
        """
        boxes_xyxy, scores = self.all_boxes(images)
        if self.suppression is None:
            return boxes_xyxy, scores
        side: Any = torch.sym_max(images.shape[2], images.shape[3])  # max() would fix which side is longer
        detections = self.suppression(boxes_xyxy, scores, side)
        return (*detections, boxes_xyxy, scores) if self.show_candidates else detections

    def all_boxes(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """All boxes and scores, as decode gives them."""
        return decode(self.network(images), self.network.heads)


def _best_first(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of each row and their columns, in stable order, which topk lacks."""
    values, order = scores.sort(dim=1, descending=True, stable=True)
    return values[:, :count], order[:, :count]


def _rows(boxes: Tensor, order: Tensor) -> Tensor:
    """Boxes (batch, m, 4) in an order (batch, m); take_along_dim would fix an exported batch."""
    return boxes.gather(1, order[..., None].expand(-1, -1, 4))


def write_onnx(
    graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes, metadata: Mapping[str, str], path: Path
) -> None:
    """Write an ONNX file with one input, ``images``, and the graph's outputs under their names.

    The shapes are those of ``example`` except along the axes in ``dynamic``. Candidates that the
    graph shows are not outputs of the file, but run_onnx finds them inside.
    """
    names = BOXES if graph.suppression is None else DETECTIONS
    hidden = CANDIDATES if graph.show_candidates else ()
    with quiet():
        program = torch.onnx.export(
            _exported(graph, example, dynamic),
            dynamo=True,
            verbose=False,
            opset_version=20,
            input_names=["images"],
            output_names=[*names, *hidden],
            dynamic_shapes={"images": dict(dynamic)} if dynamic else None,
            custom_translation_table={torch.ops.aten.sort.stable: _sort},
        )
        assert program is not None
        del program.model.graph.outputs[len(names) :]
        program.model.metadata_props.update(metadata)
        program.save(path, external_data=False)


def write_torch(
    graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes, metadata: Mapping[str, str], path: Path
) -> None:
    """Write a torch.export archive. Shapes as in write_onnx; metadata.json holds the metadata."""
    with quiet():
        exported = _exported(graph, example, dynamic)
        exported.example_inputs = None  # a large batch would add hundreds of megabytes to the file
        _save_archive(exported, metadata, path)


def _save_archive(exported: torch.export.ExportedProgram, metadata: Mapping[str, str], path: Path) -> None:
    archive = io.BytesIO()  # torch aborts where a disk is full, and stores the name of a path
    torch.export.save(exported, archive, extra_files={METADATA_FILE: json.dumps(metadata)})
    path.write_bytes(archive.getbuffer())


def write_openvino(source: Any, metadata: Mapping[str, str], path: Path) -> None:
    """Write an OpenVINO file (.xml, and .bin beside it) from an ONNX file or a loaded model."""
    import openvino

    model = openvino.convert_model(source) if isinstance(source, Path) else source
    for key, text in metadata.items():
        model.set_rt_info(text, [RT_INFO, key])
    openvino.save_model(model, path, compress_to_fp16=False)  # the ONNX file has the precision already


def _exported(graph: DetectorGraph, example: Tensor, dynamic: DynamicAxes) -> torch.export.ExportedProgram:
    # Doubled along dynamic axes: the exporter takes a batch or a side of one stride for a constant.
    repeats = [2 if axis in dynamic else 1 for axis in range(example.ndim)]
    axes = {}
    for axis, name in dynamic.items():
        in_strides = graph.network.max_stride * torch.export.Dim(f"{name}_in_strides")
        axes[axis] = torch.export.Dim(name) if axis == 0 else in_strides
    exported = torch.export.export(graph, (example.repeat(repeats),), dynamic_shapes={"images": axes or None})
    for node in exported.graph.nodes:
        node.meta.pop("stack_trace", None)  # which holds file names of this machine
    return exported


def _sort(x: Any, stable: bool = True, dim: int = -1, descending: bool = False) -> Any:
    """torch.sort(stable=True) for the ONNX exporter: TopK puts the lower of equals first."""
    from onnxscript import opset18

    op: Any = opset18  # its annotations exclude symbolic values
    length = op.Gather(op.Shape(x), op.Constant(value_ints=[dim]))
    return op.TopK(x, length, axis=dim, largest=int(descending), sorted=1)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the exporters' warnings about their internals."""
    logging.disable(logging.WARNING)
    handlers = logging.root.handlers[:]  # ONNX Runtime adds one, by which every line would come twice
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
        logging.root.handlers[:] = handlers


def run_onnx(path: Path, hidden: Sequence[str] = ()) -> Run:
    """A function that runs an ONNX file; ``hidden`` values follow its outputs."""
    import onnx
    import onnxruntime

    proto = onnx.load(path)
    for name in hidden:
        proto.graph.output.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    return lambda images: tuple(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


def run_torch(path: Path) -> Run:
    """A function that runs a torch.export archive."""
    import torchvision  # noqa: F401 - registers the suppression that the archive calls

    with quiet(), path.open("rb") as file:  # torch refuses a path that is not Unicode
        module: Any = torch.export.load(file).module()
    run: Run = torch.no_grad()(module)
    return run


def run_openvino(path: Path) -> Run:
    """A function that runs an OpenVINO file, whose float32 stays float32."""
    import openvino

    # By itself it takes bfloat16 where the processor has it.
    compiled = openvino.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def run(images: Tensor) -> Outputs:
        found = compiled.create_infer_request().infer([images.numpy()])  # threads cannot share a request
        return tuple(torch.from_numpy(values.copy()) for values in found.to_tuple())

    return run


RUNS: dict[str, Callable[[Path], Run]] = {".onnx": run_onnx, ".pt2": run_torch, ".xml": run_openvino}


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata of a file of ours; empty for others'."""
    if regular(path).suffix == ".onnx":
        import onnx

        return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}
    if path.suffix == ".xml":
        import openvino

        model = openvino.Core().read_model(path)
        known = model.get_rt_info(RT_INFO).value if model.has_rt_info(RT_INFO) else {}
        return {key: getattr(one, "value", one) for key, one in known.items()}
    with zipfile.ZipFile(path) as archive:  # torch would load the network
        ours = [name for name in archive.namelist() if name.endswith(f"/extra/{METADATA_FILE}")]
        return dict(json.loads(archive.read(ours[0]))) if ours else {}


def add_metadata(path: Path, more: Mapping[str, str]) -> None:
    """Add metadata to a file of ours, in place."""
    known = {**read_metadata(path), **more}
    if path.suffix == ".onnx":
        import onnx

        proto = onnx.load(path)
        onnx.helper.set_model_props(proto, known)
        onnx.save(proto, path)
    elif path.suffix == ".xml":
        import openvino

        weights = path.with_suffix(".bin").read_bytes()
        model = openvino.Core().read_model(path.read_bytes(), weights)  # from memory: files are written anew
        write_openvino(model, known, path)
    else:
        with quiet():
            _save_archive(torch.export.load(io.BytesIO(path.read_bytes())), known, path)


@torch.no_grad()
def check_file(
    path: Path, model: Darknet, graph: DetectorGraph, batches: Iterable[Tensor], tolerance: float = TOLERANCE
) -> tuple[float, float]:
    """Run a file of ``graph`` on batches of images and compare it with the unfused ``model``.

    Returns the largest difference of a corner, relative to the longest side of image and box, and
    of a score. Two scores that differ in the last digit may swap boxes, so the file's detections
    are compared with a suppression of its own boxes. Raises ModelError if a difference exceeds the
    tolerance, or if detections differ.
    """
    hidden = graph.show_candidates and path.suffix == ".onnx"
    run = run_onnx(path, CANDIDATES) if hidden else RUNS[path.suffix](path)
    differences = []
    for images in batches:
        outputs = run(images)
        if graph.suppression is not None and not graph.show_candidates:
            # An archive runs the same operators as the graph, so these are its boxes to the bit.
            outputs = (*outputs, *graph.all_boxes(images))
        *detections, boxes, scores = outputs
        side = max(images.shape[2:])
        expected_boxes, expected_scores = decode(model(images), model.heads)
        if not expected_scores.isfinite().all():
            raise ModelError(*NOT_FINITE)
        sizes = expected_boxes[..., 2:] - expected_boxes[..., :2]
        of_boxes = (boxes - expected_boxes) / sizes.amax(-1, keepdim=True).clamp(min=side)
        of_scores = scores - expected_scores
        differences.append([float(of_boxes.abs().max()), float(of_scores.abs().max())])
        if graph.suppression is None:
            continue
        for ours, expected in zip(detections, graph.suppression(boxes, scores, side), strict=True):
            if ours.shape != expected.shape or not torch.allclose(ours, expected, rtol=1e-6, atol=1e-6):
                raise ModelError("the file's non-maximum suppression differs from the network's", "nms=false")
    box, score = torch.tensor(differences).amax(0).tolist()
    if not (box <= tolerance and score <= tolerance):  # not "any above": NaN must not pass
        differs = f"boxes by {box:.2g} of the image size, scores by {score:.2g}, more than {tolerance:g}"
        raise ModelError(f"the file differs from the network: {differs}", "another format")
    return box, score
