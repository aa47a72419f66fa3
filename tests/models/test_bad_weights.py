"""Weights that are damaged, dangerous or of another network end a program in one sentence."""

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch

from conf.cli.program import start
from tests.models.yolox_reference import Yolox


class Code:
    """Runs a command when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch was-run",)


@pytest.mark.release
def test_bad_files_are_refused_in_one_sentence(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    cv2.imwrite("picture.png", np.zeros((64, 64, 3), np.uint8))
    state = Yolox("nano", 255 * torch.rand(1, 3, 64, 64)).state
    old = Yolox("nano", torch.randn(1, 3, 64, 64)).state
    torch.save(state, "whole.pth")
    of_v8 = {f"model.{number}.conv.weight": torch.rand(16, 3, 3, 3) for number in range(5)}
    damaged = "is damaged, or torch.save did not write it. fix: download it again"
    other_shape, not_yolox = (
        r"\(.*\) is in the place of layers\.\d+\..* fix: set model.cfg, ",
        "is not a state dict of YOLOX",
    )
    cases: dict[str, tuple[Any, str]] = {
        "truncated": (Path("whole.pth").read_bytes()[:-5000], damaged),
        "empty": (b"", damaged),
        "a web page": (b"<!DOCTYPE html>", damaged),
        "code": ({"model": Code()}, r"holds pickled objects \(\S*system\), which are not read"),
        "another project": ({"weights": {"fc": torch.rand(3)}}, "holds no state dict, neither at the top level nor"),
        "a classifier": ({"layer1.0.conv1.weight": torch.rand(64, 3, 7, 7), "fc.bias": torch.rand(9)}, other_shape),
        "YOLOv8": ({"model": of_v8}, other_shape),
        "YOLOX before 0.1.1": (old, r"is of YOLOX before 0\.1\.1, for images of another scale"),
        "YOLOX without boxes": ({key: state[key] for key in state if "reg_preds" not in key}, not_yolox),
        "YOLOX, flat": ({key: tensor.flatten() for key, tensor in state.items()}, not_yolox),
        "YOLOX and more": (state | {"head.strange.0.weight": torch.rand(1)}, not_yolox),
        "YOLOX, one tensor": ({"head.obj_preds.0.weight": torch.rand(1, 8, 1, 1)}, not_yolox),
    }

    def refused(network: str, file: str) -> str:
        given = [f"model={network}", f"model.weights={file}", "source=picture.png", "out=found", "device=cpu"]
        monkeypatch.setattr(sys, "argv", ["predict.py", *given])
        with pytest.raises(SystemExit) as ended:
            start("predict")
        said = capsys.readouterr().err.strip().removeprefix("error: ").replace("\nfix: ", " fix: ")
        assert ended.value.code == 2 and "\n" not in said and said.count("fix: ") == 1, said
        return said

    for case, (content, message) in cases.items():
        path = Path("yolox_nano.pth")
        path.unlink(missing_ok=True)  # a file that is mapped must not shrink
        path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
        assert re.search(message, refused("yolox-nano", str(path))), case
    assert re.search(other_shape, refused("yolox-tiny", "whole.pth")), "weights of another size"
    assert re.search("is not a Darknet .weights file, or damaged", refused("yolox-nano", "picture.png"))
    assert not Path("was-run").exists() and not Path("found").exists()
