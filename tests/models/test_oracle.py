"""Raw maps against OpenCV's Darknet importer on seeded random weights (opencv_reference.py)."""

import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from models import Cfg, Darknet, Head, load_cfg, load_darknet_weights, zoo_cfg
from tests.models.opencv_reference import NETWORKS, REFERENCE, SIDE, draw, write_weights

# OpenCV's own maps of yolov4-csp move by 1.8e-4 when its Winograd convolutions or its layer fusion
# are switched off, and are 1.2e-4 from what float64 gives: random weights amplify rounding through
# 115 convolutions.
TOLERANCE = {"yolov4-csp": 2e-4}


@pytest.mark.parametrize("name", NETWORKS)
def test_raw_maps_equal_opencvs(name: str, tmp_path: Path) -> None:
    reference = np.load(REFERENCE)
    maps = {key.partition("/")[2]: reference[key] for key in reference if key.startswith(f"{name}/")}
    cfg = load_cfg(zoo_cfg(name))
    values, images = draw(name, cfg.text, SIDE)
    drawn = zlib.crc32(values.tobytes() + images.tobytes())
    assert drawn == maps.pop("crc32"), "NumPy draws other numbers: renew the reference"
    assert_equal_maps(cfg, values, images, maps, tmp_path)


# The project's own zoo against the published cfg's weights and maps, and cfg files as published.
@pytest.mark.parametrize("from_zoo", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        "yolov3-tiny",
        "yolov4-tiny",
        "enet-coco",
        "yolov7-tiny",
        pytest.param("yolov4-csp", marks=pytest.mark.slow),
        pytest.param("yolov3-spp", marks=pytest.mark.slow),
    ],
)
def test_published_cfgs_equal_opencvs(name: str, from_zoo: bool, shared_dir: Path, tmp_path: Path) -> None:
    if from_zoo and name == "enet-coco":
        pytest.skip("not in the zoo")
    folder = shared_dir / "darknet" / "oracle"
    published = load_cfg(folder / f"{name}.cfg")
    values, images = draw(name, published.text, 128)
    reference = np.load(folder / f"{name}.npz")
    assert len(values) == reference["params"]
    maps = {key: reference[key] for key in reference if key.startswith("head")}
    assert_equal_maps(
        load_cfg(zoo_cfg(name)) if from_zoo else published, values, images, maps, tmp_path, TOLERANCE.get(name, 1e-5)
    )


def test_a_published_network_sees_what_opencv_sees(shared_dir: Path) -> None:
    folder = shared_dir / "darknet" / "yolo-fastest-1.1"
    expected = np.load(folder / "heads_dog.npz")
    model = Darknet(folder / "yolo-fastest-1.1.cfg").eval()
    load_darknet_weights(model, folder / "yolo-fastest-1.1.weights")
    with torch.no_grad():
        maps = model(torch.from_numpy(expected["blob"]))
    for raw, head in zip(maps, model.heads, strict=True):
        assert_equal_map(raw, head, torch.from_numpy(expected[f"conv_{head.layer - 1}"]))


def assert_equal_maps(
    cfg: Cfg,
    values: npt.NDArray[np.float32],
    images: npt.NDArray[np.float32],
    expected: Mapping[str, npt.NDArray[np.float32]],
    folder: Path,
    tolerance: float = 1e-5,
) -> None:
    """The network with these values of a .weights file maps the images as expected."""
    model = Darknet(cfg).eval()
    report = load_darknet_weights(model, write_weights(folder / "random.weights", values))
    (folder / "random.weights").unlink()  # a quarter of a gigabyte
    assert report.is_whole and model.seen == 123456789012
    with torch.no_grad():
        maps = model(torch.from_numpy(images))
    assert len(maps) == len(expected)
    for index, (raw, head) in enumerate(zip(maps, model.heads, strict=True)):
        assert_equal_map(raw, head, torch.from_numpy(expected[f"head{index}"]), tolerance)


def assert_equal_map(raw: Tensor, head: Head, reference: Tensor, tolerance: float = 1e-5) -> None:
    """Our raw map equals what feeds the [yolo] layer, after the logistic if the .cfg has one."""
    ours = raw.permute(0, 1, 4, 2, 3).flatten(1, 2)  # back to (batch, anchors * (5 + classes), rows, columns)
    if head.new_coords:
        ours = ours.sigmoid()
    assert (ours - reference).abs().max() < tolerance * reference.abs().max()
