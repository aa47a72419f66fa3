"""A file of export.py in the place of the network that it was made from."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from conf import errors
from data.errors import printable
from models import Darknet, ModelError
from models.export import RUNS, read_metadata

REQUIRED = {"names": list, "category_ids": list, "image_size": list, "stride": int, "open": list}


class ExportedNetwork(Darknet):
    """A file that takes a network's place in evaluation and prediction; it runs on the CPU.

    It has no heads, because the file decodes: it returns boxes and scores for raw maps. Raises
    ModelError for a missing package, and for a file without the metadata of export.py.
    """

    def __init__(self, path: Path) -> None:
        nn.Module.__init__(self)
        try:
            known = {key: json.loads(text) for key, text in read_metadata(path).items() if text[:1] in '[{"0123456789'}
            self.run = RUNS[path.suffix](path)
        except ImportError as error:
            raise ModelError(f"{path} needs {error.name}. fix: {errors.install_command(str(error.name))}") from error
        except Exception as error:  # each runtime has its own for a damaged file
            raise ModelError(f"{path} cannot be read ({errors.first_line(error)}). fix: a file of export.py") from error
        if wrong := [key for key, kind in REQUIRED.items() if not isinstance(known.get(key), kind)]:
            raise ModelError(f"{path} does not say its {wrong[0]}. fix: a file of export.py")
        self.names, self.category_ids = [printable(str(name)) for name in known["names"]], known["category_ids"]
        self.num_classes, self.max_stride, self.image_size = len(self.names), known["stride"], known["image_size"]
        self.takes_any_size = "height" in known["open"]
        self.batch_size = None if "batch" in known["open"] else known.get("batch_size", 1)
        self.heads, self.layers, self.num_frozen = [], nn.ModuleList(), 0

    def __deepcopy__(self, memo: Any) -> "ExportedNetwork":
        return self

    def forward(self, images: Tensor) -> list[Tensor]:
        """All boxes_xyxy (batch, n, 4) and scores (batch, n, classes) of images like Darknet's.

        Of a file with suppression these are its detections: each scores for one class alone.
        """
        size, parts = self.batch_size or len(images), []
        for part in images.contiguous().split(size):  # contiguous: a .pt2 of one batch has fixed strides
            missing = part.new_zeros(size - len(part), *part.shape[1:])
            outputs = self.run(torch.cat((part, missing)) if len(missing) else part)
            parts.append([output[: len(part)] for output in outputs])
        boxes, scores, *classes = [torch.cat(column) for column in zip(*parts, strict=True)]
        if classes:
            of_all = scores.new_zeros(*scores.shape, self.num_classes)
            scores = of_all.scatter_(2, classes[0][..., None].long(), scores[..., None])
        return [boxes, scores]

    def nearest_size(self, height: int, width: int) -> tuple[int, int]:
        """The (height, width) of images, in pixels, nearest to these that the file takes."""
        return super().nearest_size(height, width) if self.takes_any_size else (self.image_size[0], self.image_size[1])
