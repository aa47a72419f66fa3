"""Weights of another network, and of YOLOX in another form, are refused in one sentence."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from models import Darknet, ModelError, load_foreign_state_dict, zoo_cfg
from tests.models.yolox_reference import Yolox


@pytest.mark.release
def test_what_is_not_this_yolox_is_refused_in_one_sentence() -> None:
    state = Yolox("nano", 255 * torch.rand(1, 3, 64, 64)).state
    old = Yolox("nano", torch.randn(1, 3, 64, 64)).state
    other_shape = r"\(.*\) is in the place of layers\.\d+\..* fix: set model.cfg, "
    not_yolox = "is not a state dict of YOLOX"
    cases: dict[str, tuple[Any, str]] = {
        "a classifier": ({"layer1.0.conv1.weight": torch.rand(64, 3, 7, 7), "fc.bias": torch.rand(9)}, other_shape),
        "YOLOv8": ({f"model.{number}.conv.weight": torch.rand(16, 3, 3, 3) for number in range(5)}, other_shape),
        "another size": (Yolox("tiny", 255 * torch.rand(1, 3, 64, 64)).state, other_shape),
        "YOLOX before 0.1.1": (old, r"is of YOLOX before 0\.1\.1, for images of another scale"),
        "YOLOX without boxes": ({key: state[key] for key in state if "reg_preds" not in key}, not_yolox),
        "YOLOX, flat": ({key: tensor.flatten() for key, tensor in state.items()}, not_yolox),
        "YOLOX and more": (state | {"head.strange.0.weight": torch.rand(1)}, not_yolox),
        "YOLOX, one tensor": ({"head.obj_preds.0.weight": torch.rand(1, 8, 1, 1)}, not_yolox),
    }
    model = Darknet(zoo_cfg("yolox-nano"))
    for case, (content, message) in cases.items():
        with pytest.raises(ModelError) as refused:
            load_foreign_state_dict(model, content, Path("yolox_nano.pth"))
        said = str(refused.value)
        assert re.search(message, said) and "\n" not in said and said.count("fix: ") == 1, f"{case}: {said}"
