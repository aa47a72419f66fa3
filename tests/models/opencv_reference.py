"""The recipe of opencv_reference.npz: raw maps of the zoo's tiny networks, computed by OpenCV.

OpenCV's Darknet importer reads the .cfg and a .weights file of seeded random values and computes
one seeded random image of 64 x 64 pixels. The maps are what feeds each [yolo] section. Versions 5
and later of OpenCV have no importer, so that the recipe needs an environment of its own:

    uv run --no-project --with opencv-python-headless==4.12.0.88 \\
        python tests/models/opencv_reference.py
"""

import re
import tempfile
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
NETWORKS, SIDE = ("yolov3-tiny", "yolov4-tiny", "yolov3-tiny-decoupled"), 64
ZOO = Path(__file__).resolve().parents[2] / "models" / "zoo"
REFERENCE = Path(__file__).with_suffix(".npz")


def sections_of(text: str) -> list[tuple[str, dict[str, str]]]:
    """The kinds and options of a .cfg, read as simply as possible."""
    sections: list[tuple[str, dict[str, str]]] = []
    for line in text.splitlines():
        content = "".join(re.split("[#;]", line)[0].split())
        if content.startswith("["):
            sections.append((content.strip("[]"), {}))
        elif content:
            key, _, value = content.partition("=")
            sections[-1][1][key] = value
    return sections


def random_weights(text: str, rng: np.random.Generator) -> Array:
    """The values of a .weights file of a .cfg, in Darknet's order."""
    (_, net), *layers = sections_of(text)
    channels: list[int] = []
    parts: list[npt.NDArray[np.float64]] = []
    for index, (kind, options) in enumerate(layers):
        out = previous = channels[-1] if channels else int(net.get("channels", 3))
        if kind == "convolutional":
            out, size, groups = (int(options.get(key, 1)) for key in ("filters", "size", "groups"))
            fan_in = previous // groups * size * size
            parts.append(rng.normal(0, 0.1, out))  # biases, or batch norm's beta
            if int(options.get("batch_normalize", 0)):  # gamma, mean, variance
                parts += [rng.uniform(0.7, 1.3, out), rng.normal(0, 0.1, out), rng.uniform(0.5, 1.5, out)]
            parts.append(rng.normal(0, (1.6 / fan_in) ** 0.5, out * fan_in))
        elif kind == "route":
            sources = [int(item) for item in options["layers"].split(",") if item]
            out = sum(channels[source if source >= 0 else index + source] for source in sources)
            out //= int(options.get("groups", 1))
        elif kind in ("sam", "scale_channels"):
            source = int(options["from"])
            out = channels[source if source >= 0 else index + source]
        channels.append(out)
    return np.concatenate(parts).astype("<f4")


def draw(name: str, text: str, side: int) -> tuple[Array, Array]:
    """The values of the .weights file and the image (1, 3, side, side) of a network."""
    rng = np.random.default_rng(zlib.crc32(f"{name}.cfg".encode()))
    values = random_weights(text, rng)
    return values, rng.random((1, 3, side, side), dtype=np.float32)


def write_weights(path: Path, values: Array) -> Path:
    """Write a .weights file of version 0.2.5 that has seen 123,456,789,012 images."""
    header = np.array([0, 2, 5], "<i4").tobytes() + np.array([123456789012], "<i8").tobytes()
    path.write_bytes(header + values.tobytes())
    return path


def main() -> None:
    """Write opencv_reference.npz."""
    import cv2

    maps: dict[str, Array] = {}
    for name in NETWORKS:
        text = re.sub(r"(?m)^(width|height)\s*=.*$", rf"\1={SIDE}", (ZOO / f"{name}.cfg").read_text())
        values, images = draw(name, text, SIDE)
        with tempfile.TemporaryDirectory() as folder:
            cfg = Path(folder) / "network.cfg"
            cfg.write_text(text)
            weights = write_weights(Path(folder) / "network.weights", values)
            network = cv2.dnn.readNetFromDarknet(str(cfg), str(weights))  # type: ignore[attr-defined]
        network.setInput(images)
        layers = network.getLayerNames()
        # OpenCV permutes the map first in each [yolo] section.
        before = [layers[place - 1] for place, layer in enumerate(layers) if layer.startswith("permute_")]
        maps |= {f"{name}/head{index}": map_ for index, map_ in enumerate(network.forward(before))}
        maps[f"{name}/crc32"] = np.array(zlib.crc32(values.tobytes() + images.tobytes()))
    np.savez_compressed(REFERENCE, **maps)


if __name__ == "__main__":
    main()
