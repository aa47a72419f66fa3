"""YOLOX: its networks compute here what they compute there, and other files are refused."""

import contextlib
import io
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchvision.ops import batched_nms

from models import Darknet, ModelError, WeightsReport, load_foreign_state_dict, save_darknet_weights, zoo_cfg
from models.decode import decode
from tests.models.yolox_reference import CLASSES, SIZES, STRIDES, Yolox, decoded, nano_of_onnx, trained_like
from tests.train_utils.losses import loss_of

SLOW = [pytest.param(name, marks=pytest.mark.release) for name in (*SIZES, "darknet53") if name != "nano"]
PATH, SIDE = Path("yolox.pth"), 416


def load(
    name: str, content: dict[str, Any], classes: int = CLASSES, dtype: torch.dtype = torch.float32
) -> tuple[Darknet, WeightsReport]:
    model = Darknet(zoo_cfg(f"yolox-{name}"), classes).to(dtype)
    return model.eval(), load_foreign_state_dict(model, content, PATH)


def as_yolox(maps: list[Tensor]) -> list[Tensor]:
    return [raw[:, 0].permute(0, 3, 1, 2) for raw in maps]


@pytest.mark.parametrize("name", ["nano", *SLOW])
@torch.no_grad()
def test_every_size_computes_what_yolox_computes(name: str) -> None:
    torch.manual_seed(0)
    images = torch.rand(2, 3, 64, 96).double()  # differences of float32 would grow through a hundred layers
    bgr = 255 * images.flip(1)
    reference = trained_like(name, bgr)
    content = {"start_epoch": 300, "model": reference.state_dict(), "optimizer": {"state": {}}}
    model, report = load(name, content, dtype=torch.float64)
    assert report.is_whole and not report.note
    maps, expected = model(images), reference(bgr)
    for ours, theirs in zip(as_yolox(maps), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-8)
    boxes, scores = decode(maps, model.heads)
    torch.testing.assert_close(torch.cat((boxes, scores), 2), decoded(expected).float(), rtol=1e-5, atol=1e-3)
    fresh, report = load(name, content, classes=5, dtype=torch.float64)
    assert report.heads_left_out and report.num_classes == CLASSES
    assert len(report.loaded) == report.layers_total - len(fresh.heads)  # without those of the classes
    for ours, theirs in zip(fresh(images), maps, strict=True):
        assert torch.equal(ours[..., :5], theirs[..., :5])


def test_other_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    state = trained_like("nano", 255 * torch.rand(1, 3, 64, 64)).state_dict()
    old = trained_like("nano", torch.randn(1, 3, 64, 64)).state_dict()
    cut = {name: tensor for name, tensor in state.items() if "reg_preds" not in name}
    flat = {name: tensor.flatten() for name, tensor in state.items()}
    of_v8 = {f"model.{number}.conv.weight": torch.rand(16, 3, 3, 3) for number in range(5)}
    cases = (
        (old, r"is of YOLOX before 0\.1\.1, for images of another scale\. fix: "),
        (cut, r"is not a state dict of YOLOX \(KeyError.*\. fix: download it again"),
        (flat, r"is not a state dict of YOLOX .*\. fix: download it again"),
        ({**state, "head.strange.0.weight": torch.rand(1)}, "is not a state dict of YOLOX .* fix: download it again"),
        ({"head.obj_preds.0.weight": torch.rand(1, 8, 1, 1)}, r"is not a state dict of YOLOX .*fix: "),
        (of_v8, r"model\.0\.conv\.weight of shape .* is in the place of layers\.0\.conv"),
        ({"model": "code"}, "holds no state dict"),
        (Yolox("tiny").state_dict(), "YOLOX before|is in the place of layers"),
    )
    for content, message in cases:
        with pytest.raises(ModelError, match=message):
            load("nano", content)
    with pytest.raises(ModelError, match="is in the place of layers"):
        load("tiny", state)
    with pytest.raises(ModelError, match=r"Darknet cannot read bn_eps=0\.001 and linear_xy of yolox-nano\.cfg"):
        save_darknet_weights(load("nano", state)[0], tmp_path / "a.weights")


def letterboxed(path: Path) -> tuple[Tensor, float]:
    """An image as YOLOX reads it: BGR in 0..255 at the top left of grey 114; and its scale."""
    image = cv2.imread(str(path))
    scale = min(SIDE / image.shape[0], SIDE / image.shape[1])
    canvas = np.full((SIDE, SIDE, 3), 114, np.uint8)
    small = cv2.resize(image, (int(image.shape[1] * scale), int(image.shape[0] * scale)))
    canvas[: small.shape[0], : small.shape[1]] = small
    return torch.from_numpy(canvas.transpose(2, 0, 1).copy()).float(), scale


def average_precision(truth: COCO, found: Tensor, scales: list[float]) -> tuple[float, float]:
    """AP and AP50 by YOLOX's protocol from its boxes and scores (n, cells, 4 + classes)."""
    results, categories = [], sorted(truth.getCatIds())
    for image, boxes, scale in zip(sorted(truth.getImgIds()), found, scales, strict=True):
        scores, classes = boxes[:, 4:].max(1)
        kept = torch.nonzero(scores >= 0.01)[:, 0]
        kept = kept[batched_nms(boxes[kept, :4], scores[kept], classes[kept], 0.65)]
        corners = boxes[kept, :4] / scale
        sizes = torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1)
        for box, score, number in zip(sizes.tolist(), scores[kept].tolist(), classes[kept].tolist(), strict=True):
            results.append({"image_id": image, "category_id": categories[number], "bbox": box, "score": score})
    with contextlib.redirect_stdout(io.StringIO()):
        scored = COCOeval(truth, truth.loadRes(results), "bbox")
        scored.evaluate()
        scored.accumulate()
        scored.summarize()
    return scored.stats[0], scored.stats[1]


@pytest.mark.release
def test_the_published_nano_scores_as_its_export_does_and_keeps_its_score_in_training(shared_dir: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO(str(shared_dir / "data/coco128/annotations/instances_val2017.json"))
    files = [truth.imgs[image]["file_name"] for image in sorted(truth.getImgIds())]
    pairs = [letterboxed(shared_dir / "data/coco128/images/val2017" / file) for file in files]
    bgr, scales = torch.stack([pair[0] for pair in pairs]), [pair[1] for pair in pairs]
    path = shared_dir / "yolox/yolox_nano.onnx"
    session = onnxruntime.InferenceSession(str(path))
    flat = torch.cat([torch.from_numpy(session.run(None, {"images": image[None].numpy()})[0]) for image in bgr])
    shapes = [(SIDE // stride, SIDE // stride) for stride in STRIDES]
    parts = flat.split([rows * columns for rows, columns in shapes], dim=1)
    theirs = [part.mT.unflatten(2, shape) for part, shape in zip(parts, shapes, strict=True)]
    logits = [torch.cat((raw[:, :4], raw[:, 4:].logit()), 1) for raw in theirs]  # the file ends in probabilities

    model, _ = load("nano", {"model": nano_of_onnx(path, bgr).state_dict()})
    images = bgr.flip(1) / 255

    def ours() -> Tensor:
        with torch.no_grad():
            return torch.cat(decode(model.eval()(images), model.heads), 2)

    with torch.no_grad():
        maps = as_yolox(model(images))
    for raw, wanted in zip(maps, theirs, strict=True):
        torch.testing.assert_close(raw[:, :4], wanted[:, :4], rtol=0, atol=1e-3)
        torch.testing.assert_close(raw[:, 4:].sigmoid(), wanted[:, 4:], rtol=0, atol=1e-4)
    torch.testing.assert_close(ours(), decoded(logits), rtol=1e-4, atol=0.05)
    for found in (decoded(logits), ours()):
        assert average_precision(truth, found, scales) == pytest.approx((0.336187, 0.493830), abs=2e-6)

    targets = []
    chosen = range(0, len(files), 8)
    for number, index in enumerate(chosen):
        for box in truth.imgToAnns[sorted(truth.getImgIds())[index]]:
            x, y, width, height = (value * scales[index] for value in box["bbox"])
            label = sorted(truth.getCatIds()).index(box["category_id"])
            targets.append([number, label, x + width / 2, y + height / 2, width, height])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss = loss_of(model.heads, "loss=yolox")
    loss(model.train()(images[list(chosen)]), torch.tensor(targets)).total.backward()
    optimizer.step()
    assert average_precision(truth, ours(), scales)[0] > 0.330
