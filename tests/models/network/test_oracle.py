"""Raw maps against OpenCV's Darknet importer on seeded random weights.

They lie in shared_dir/darknet/oracle.
"""

import importlib.util
import zlib
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from models import Darknet, Head, load_cfg, load_darknet_weights, zoo_cfg

SIDE = 128
# OpenCV's own maps of yolov4-csp move by 1.8e-4 when its Winograd convolutions or its layer fusion
# are switched off, and are 1.2e-4 from what float64 gives: random weights amplify rounding through
# 115 convolutions.
TOLERANCE = {"yolov4-csp": 2e-4}


def load_recipe(folder: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_oracle", folder / "make_oracle.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_weights(path: Path, values: np.ndarray) -> Path:
    path.write_bytes(
        np.array([0, 2, 5], "<i4").tobytes() + np.array([123456789012], "<i8").tobytes() + values.tobytes()
    )
    return path


# The project's own zoo against the published cfg's weights and maps, and cfg files as published.
@pytest.mark.parametrize(
    ("name", "from_zoo"),
    [
        ("yolov3-tiny", False),
        ("yolov3-tiny", True),
        ("yolov4-tiny", False),
        ("yolov4-tiny", True),
        ("enet-coco", False),
        ("yolov7-tiny", False),
        ("yolov7-tiny", True),
        pytest.param("yolov4-csp", False, marks=pytest.mark.slow),
        pytest.param("yolov4-csp", True, marks=pytest.mark.slow),
        pytest.param("yolov3-spp", False, marks=pytest.mark.slow),
        pytest.param("yolov3-spp", True, marks=pytest.mark.slow),
    ],
)
def test_raw_maps_equal_opencvs(name: str, from_zoo: bool, shared_dir: Path, tmp_path: Path) -> None:
    folder = shared_dir / "darknet" / "oracle"
    recipe, expected = load_recipe(folder), np.load(folder / f"{name}.npz")
    published = folder / f"{name}.cfg"
    rng = np.random.default_rng(zlib.crc32(published.name.encode()))
    values = recipe.random_weights(recipe.parse(published.read_text()), rng)
    images = rng.random((1, 3, SIDE, SIDE), dtype=np.float32)
    assert len(values) == expected["params"]

    model = Darknet(load_cfg(zoo_cfg(name) if from_zoo else published)).eval()
    report = load_darknet_weights(model, write_weights(tmp_path / "random.weights", values))
    (tmp_path / "random.weights").unlink()  # a quarter of a gigabyte
    assert report.is_whole and model.seen == 123456789012
    with torch.no_grad():
        maps = model(torch.from_numpy(images))
    assert len(maps) == len([key for key in expected if key.startswith("head")])
    for index, (raw, head) in enumerate(zip(maps, model.heads, strict=True)):
        assert_equal_map(raw, head, torch.from_numpy(expected[f"head{index}"]), TOLERANCE.get(name, 1e-5))


def test_a_published_network_sees_what_opencv_sees(shared_dir: Path) -> None:
    folder = shared_dir / "darknet" / "yolo-fastest-1.1"
    expected = np.load(folder / "heads_dog.npz")
    model = Darknet(folder / "yolo-fastest-1.1.cfg").eval()
    load_darknet_weights(model, folder / "yolo-fastest-1.1.weights")
    with torch.no_grad():
        maps = model(torch.from_numpy(expected["blob"]))
    for raw, head in zip(maps, model.heads, strict=True):
        assert_equal_map(raw, head, torch.from_numpy(expected[f"conv_{head.layer - 1}"]))


def assert_equal_map(raw: Tensor, head: Head, reference: Tensor, tolerance: float = 1e-5) -> None:
    """Our raw map equals what feeds the [yolo] layer, after the logistic if the .cfg has one."""
    ours = raw.permute(0, 1, 4, 2, 3).flatten(1, 2)  # back to (batch, anchors * (5 + classes), rows, columns)
    if head.new_coords:
        ours = ours.sigmoid()
    assert (ours - reference).abs().max() < tolerance * reference.abs().max()
