"""Receptive fields against the rows of NaN in an image that turn a cell into NaN."""

import math

import pytest
import torch

from models import Darknet, parse_cfg
from models.network.receptive_field import receptive_fields
from tests.models.cfg_writer import cfg, conv, head, route, section, shortcut

SIDE = 128


@pytest.mark.parametrize(
    "layers",
    [
        [conv(8, 3), conv(8, 5, 2), conv(8, 3, dilation=3)],
        [conv(8, 3, 2), section("maxpool", size=2, stride=2), section("maxpool", size=5, stride=1), conv(8, 3, 2)],
        [conv(8, 3, 2), conv(8, 3), conv(8, 3), shortcut(-3), route(-1, 0), conv(8)],
        [conv(8, 3, 2, antialiasing=1), section("maxpool", size=2, stride=2, antialiasing=2), conv(8, 3)],
        [conv(8, 3, 2), section("reorg3d", stride=2), conv(8, 3), section("upsample", stride=2), conv(8, 3)],
        [conv(8, 3), conv(8, 3), conv(8, 3, share_index=-1, dilation=2), section("local_avgpool", size=3, stride=1)],
        [conv(8, 3), section("upsample", stride=-2), conv(8, 3, 2), section("dropout", probability=0.5)],
    ],
)
def test_field_is_what_reaches_a_cell(layers: list[str]) -> None:
    text = cfg(*layers, head(0))
    model = Darknet(parse_cfg(text, "field.cfg")).eval()
    images = torch.zeros(SIDE, 3, SIDE, 8 * model.max_stride)
    for row in range(SIDE):
        images[row, :, row] = math.nan  # each image lacks one row
    with torch.no_grad():
        raw = model(images)[0]
    middle = raw[:, 0, raw.shape[2] // 2].isnan().flatten(1).any(1)
    field = receptive_fields(model)[model.heads[0].layer]
    assert field is not None and field[0] == field[1] == middle.sum().item() < SIDE


def test_unequal_strides_and_global_pooling() -> None:
    excited = section("avgpool") + conv(8) + section("scale_channels", from_=0)
    text = cfg(conv(8, 3, stride_y=2), conv(8, 3), conv(8, 3, stride_x=2), head(0), route(0), excited)
    fields = receptive_fields(Darknet(parse_cfg(text, "field.cfg")))
    assert fields[:3] == [(3, 3), (7, 5), (11, 7)]
    assert fields[5] == fields[0] and fields[6:] == [None, None, None]
