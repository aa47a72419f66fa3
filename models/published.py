"""The published weights of the zoo: where they are and what identifies them. Imports no torch.

Addresses and SHA-1 are those of OpenCV's samples/dnn/models.yml and AlexeyAB/darknet's README. A
file has a header of 20 bytes and 4 bytes for each value of the network, or of its first layers.
Backbones of timm have the first digits of their SHA-256 in their names, and Apache's licence.
"""

from pathlib import Path
from typing import NamedTuple

from models.errors import ModelError

COCO, BACKBONE = "coco", "backbone"  # of model.weights
TIMM53, TIMM_CSP53 = "timm:darknet53.c2ns_in1k", "timm:cspdarknet53.ra_in1k"
COCO_NAMES = Path(__file__).parent / "zoo" / "coco.names"
BACKBONE_LAYERS = {  # the layers that Darknet's users keep, and model.freeze=backbone freezes
    "yolov3": 75,
    "yolov3-spp": 75,
    "yolov3-spp-decoupled": 75,
    "yolov3-tiny": 15,
    "yolov3-tiny-3l": 15,
    "yolov3-tiny-decoupled": 13,
    "yolov4": 137,
    "yolov4-csp": 142,
    "yolov4-tiny": 29,
    "yolov7-tiny": 87,
}
LICENCE = (
    "Darknet's authors put theirs in the public domain; timm's have the Apache licence.\n"
    "The pictures of COCO and ImageNet that they learnt from have licences of their own."
)
_REDMON = "https://pjreddie.com/media/files"
_RELEASES = "https://github.com/AlexeyAB/darknet/releases/download"
_TIMM = "https://github.com/rwightman/pytorch-image-models/releases/download"
DARKNET53 = "yolov3", "yolov3-spp", "yolov3-spp-decoupled"  # networks with this backbone
_V3, _V4 = f"{_RELEASES}/darknet_yolo_v3_optimal", f"{_RELEASES}/darknet_yolo_v4_pre"


class Published(NamedTuple):
    """A file of weights: of all layers, trained on COCO, or of a backbone."""

    networks: tuple[str, ...]  # of the zoo
    kind: str  # of WORDS
    url: str
    size: int | None  # in bytes; None: not published
    sha1: str | None = None  # None: not published
    sha256: str | None = None  # its first digits

    @property
    def file_name(self) -> str:
        """Its name there and here."""
        return self.url.rpartition("/")[2]

    @property
    def name(self) -> str:
        """How get_weights calls it."""
        return self.file_name.removesuffix(".weights")


PUBLISHED = (
    Published(("yolov3",), COCO, f"{_REDMON}/yolov3.weights", 248_007_048, "520878f12e97cf820529daea502acca380f1cb8e"),
    Published(("yolov3-spp",), COCO, f"{_REDMON}/yolov3-spp.weights", 252_209_544),
    Published(("yolov3-tiny",), COCO, f"{_REDMON}/yolov3-tiny.weights", 35_434_956),
    Published(("yolov4",), COCO, f"{_V3}/yolov4.weights", 257_717_640, "0143deb6c46fcc7f74dd35bf3c14edc3784e99ee"),
    Published(("yolov4-csp",), COCO, f"{_V4}/yolov4-csp.weights", 211_944_840),
    Published(
        ("yolov4-tiny",), COCO, f"{_V4}/yolov4-tiny.weights", 24_251_276, "451caaab22fb9831aa1a5ee9b5ba74a35ffa5dcb"
    ),
    Published(DARKNET53, BACKBONE, f"{_REDMON}/darknet53.conv.74", 162_482_580),
    Published(("yolov4",), BACKBONE, f"{_V3}/yolov4.conv.137", 170_038_676),
    Published(("yolov4-csp",), BACKBONE, f"{_V4}/yolov4-csp.conv.142", 146_548_116),
    Published(("yolov4-tiny",), BACKBONE, f"{_V4}/yolov4-tiny.conv.29", 19_789_716),
    Published(DARKNET53, TIMM53, f"{_TIMM}/v0.1-tpu-weights/darknet53_256_c2ns-3aeff817.pth", None, sha256="3aeff817"),
    Published(
        ("yolov4",), TIMM_CSP53, f"{_TIMM}/v0.1-weights/cspdarknet53_ra_256-d05c7c21.pth", None, None, "d05c7c21"
    ),
)
WORDS = frozenset(entry.kind for entry in PUBLISHED)  # of model.weights


def find_published(weights: str, network: str, width: float) -> Published | None:
    """The file that ``model.weights`` means for ``model.cfg``; None if it is no word for one.

    Raises ModelError if nothing is published for this network.
    """
    if weights not in WORDS:
        return None
    for entry in PUBLISHED:
        if weights == entry.kind and network in entry.networks and width == 1:
            return entry
    zoo = sorted({name for entry in PUBLISHED if entry.kind == weights for name in entry.networks})
    raise ModelError(
        f"model.weights={weights} is published for {', '.join(zoo)} with model.width=1, not for model.cfg={network} and"
        f" model.width={width:g}. fix: model.weights=<file>, or null"
    )
