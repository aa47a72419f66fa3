"""The published weights of the zoo: where they are and what identifies them. Imports no torch.

Addresses and SHA-1 are those of OpenCV's samples/dnn/models.yml and AlexeyAB/darknet's README. A
file has a header of 20 bytes and 4 bytes for each value of the network, or of its first layers.
The names of timm's backbones hold the first digits of their SHA-256.
"""

from typing import NamedTuple

from models.cfg import ZOO_FOLDER
from models.errors import ModelError

COCO, BACKBONE = "coco", "backbone"  # values of model.weights
TIMM53, TIMM_CSP53 = "timm:darknet53.c2ns_in1k", "timm:cspdarknet53.ra_in1k"
COCO_NAMES = ZOO_FOLDER / "coco.names"
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
    """A file of weights: of a whole network, trained on COCO, or of a backbone."""

    networks: tuple[str, ...]  # of the zoo
    alias: str  # the value of model.weights that stands for it
    url: str
    size: int | None  # in bytes; None: not published
    sha1: str | None = None  # None: not published
    sha256: str | None = None  # its first digits

    @property
    def file_name(self) -> str:
        """Its name where it is published, and in the cache."""
        return self.url.rpartition("/")[2]

    @property
    def name(self) -> str:
        """Its name in scripts.get_weights."""
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
ALIASES = frozenset(entry.alias for entry in PUBLISHED)


def find_published(weights: str, network: str, width: float) -> Published | None:
    """The file that ``model.weights`` stands for; None if it is not an alias.

    Raises ModelError if no such file is published for ``model.cfg`` and ``model.width``.
    """
    if weights not in ALIASES:
        return None
    for entry in PUBLISHED:
        if weights == entry.alias and network in entry.networks and width == 1:
            return entry
    zoo = sorted({name for entry in PUBLISHED if entry.alias == weights for name in entry.networks})
    raise ModelError(
        f"model.weights={weights} is published for {', '.join(zoo)} with model.width=1, not for model.cfg={network} and"
        f" model.width={width:g}. fix: model.weights=<file>, or null"
    )
