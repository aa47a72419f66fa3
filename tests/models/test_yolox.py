"""YOLOX: its networks compute here what they compute there, in detection and in training."""

from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest
import torch
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from torch import Tensor
from torchvision.ops import batched_nms

from models import Darknet, ModelError, load_foreign_state_dict, save_darknet_weights, zoo_cfg
from models.decode import decode
from tests.models.yolox_reference import CLASSES, STRIDES, Yolox, decoded, nano_of_onnx
from tests.train_utils.losses import loss_of

SIDE = 416
LARGE = [pytest.param(name, marks=pytest.mark.release) for name in ("m", "l", "x", "darknet53")]


def loaded(reference: Yolox, classes: int = CLASSES, dtype: torch.dtype = torch.float32) -> Darknet:
    with torch.device("meta"):  # random values would cost as much as the rest
        model = Darknet(zoo_cfg(f"yolox-{reference.name}"), classes).to(dtype)
    content = {"start_epoch": 300, "model": reference.state, "optimizer": {"state": {}}}
    report = load_foreign_state_dict(model.to_empty(device="cpu"), content, Path("yolox.pth"))
    left_out = 0 if classes == CLASSES else len(model.heads)  # the convolutions of classes alone
    assert len(report.loaded) == report.layers_total - left_out and report.num_classes == CLASSES
    return model.eval()


def as_yolox(maps: list[Tensor]) -> list[Tensor]:
    return [raw[:, 0].permute(0, 3, 1, 2) for raw in maps]


@pytest.mark.parametrize("name", ["nano", "tiny", "s", *LARGE])
@torch.no_grad()
def test_every_size_computes_what_yolox_computes(name: str, tmp_path: Path) -> None:
    images = torch.rand(1, 3, 64, 96).double()  # differences of float32 would grow through a hundred layers
    bgr = 255 * images.flip(1)
    reference = Yolox(name, bgr)
    model, expected = loaded(reference, dtype=torch.float64), reference.maps
    maps = model(images)
    for ours, theirs in zip(as_yolox(maps), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    boxes, scores = decode(maps, model.heads)
    torch.testing.assert_close(torch.cat((boxes, scores), 2), decoded(expected).float(), rtol=1e-5, atol=1e-3)
    if name == "nano":
        for ours, theirs in zip(loaded(reference, 5, torch.float64)(images), maps, strict=True):
            assert torch.equal(ours[..., :5], theirs[..., :5])
        with pytest.raises(ModelError, match=r"Darknet cannot read bn_eps=0\.001 and linear_xy of yolox-nano\.cfg"):
            save_darknet_weights(model, tmp_path / "a.weights")
        # The statistics are those of these images, so a pass of training computes the same.
        for ours, theirs in zip(as_yolox(model.train()(images)), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def scale_of(truth: COCO, image: int) -> Tensor:
    return torch.tensor([truth.imgs[image]["width"], truth.imgs[image]["height"]]) / SIDE


def average_precision(truth: COCO, images: list[int], found: Tensor) -> float:
    """AP by YOLOX's protocol of its boxes and scores (n, cells, 4 + classes)."""
    results, categories = [], sorted(truth.getCatIds())
    for image, boxes in zip(images, found, strict=True):
        scores, classes = boxes[:, 4:].max(1)
        kept = torch.nonzero(scores >= 0.01)[:, 0]
        kept = kept[batched_nms(boxes[kept, :4], scores[kept], classes[kept], 0.65)]
        corners = boxes[kept, :4] * scale_of(truth, image).repeat(2)
        sizes = torch.cat((corners[:, :2], corners[:, 2:] - corners[:, :2]), 1)
        for box, score, number in zip(sizes.tolist(), scores[kept].tolist(), classes[kept].tolist(), strict=True):
            results.append({"image_id": image, "category_id": categories[number], "bbox": box, "score": score})
    scored = COCOeval(truth, truth.loadRes(results), "bbox")
    scored.params.imgIds = images
    scored.evaluate()
    scored.accumulate()
    precision = scored.eval["precision"][..., 0, -1]  # of all areas, at most 100 boxes
    return float(precision[precision >= 0].mean())


@pytest.mark.release
def test_the_published_nano_scores_as_its_export_does_and_keeps_its_score_in_training(shared_dir: Path) -> None:
    path, folder = shared_dir / "yolox/yolox_nano.onnx", shared_dir / "data/coco128"
    truth = COCO(str(folder / "annotations/instances_val2017.json"))
    images, categories = sorted(truth.getImgIds())[::8], sorted(truth.getCatIds())
    files = [cv2.imread(str(folder / "images/val2017" / truth.imgs[image]["file_name"])) for image in images]
    stretched = np.stack([cv2.resize(file, (SIDE, SIDE)) for file in files])
    bgr = torch.from_numpy(stretched).permute(0, 3, 1, 2).float()
    session = onnxruntime.InferenceSession(str(path))
    flat = torch.cat([torch.from_numpy(session.run(None, {"images": image[None].numpy()})[0]) for image in bgr])
    parts = flat.split([(SIDE // stride) ** 2 for stride in STRIDES], dim=1)
    theirs = [part.mT.unflatten(2, (SIDE // stride, -1)) for part, stride in zip(parts, STRIDES, strict=True)]
    expected = decoded([torch.cat((raw[:, :4], raw[:, 4:].logit()), 1) for raw in theirs])  # it ends in probabilities
    score = average_precision(truth, images, expected)

    rgb, few = bgr.flip(1) / 255, slice(0, None, 2)
    model = loaded(nano_of_onnx(path, bgr[few]))
    with torch.no_grad():
        maps = model(rgb)
        found = torch.cat(decode(maps, model.heads), 2)
    for raw, wanted in zip(as_yolox(maps), theirs, strict=True):
        torch.testing.assert_close(raw[:, :4], wanted[:, :4], rtol=0, atol=1e-3)
        torch.testing.assert_close(raw[:, 4:].sigmoid(), wanted[:, 4:], rtol=0, atol=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0.05)
    assert 0.25 < score == pytest.approx(average_precision(truth, images, found), abs=2e-6)

    targets = []
    for number, image in enumerate(images[few]):
        for box in truth.imgToAnns[image]:
            corner, size = (torch.tensor(box["bbox"]) / scale_of(truth, image).repeat(2)).split(2)
            targets.append([number, categories.index(box["category_id"]), *(corner + size / 2), *size])
    loss = loss_of(model.heads, "loss=yolox")(model.train()(rgb[few]), torch.tensor(targets)).total
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()
    with torch.no_grad():
        found = torch.cat(decode(model.eval()(rgb), model.heads), 2)
    assert average_precision(truth, images, found) > score - 5e-3
