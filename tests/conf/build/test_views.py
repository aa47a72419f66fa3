"""Slices and test-time augmentation in evaluation and prediction."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from conf.build import evaluator as building
from conf.build.evaluator import Evaluator
from conf.build.network import TrainedNetwork
from conf.build.predictor import Predictor
from conf.entry import compose
from conf.schema import TrainConfig
from conf.schema_inference import PredictConfig
from conf.sources.checkpoints import model_or_checkpoint
from data import DataFormat, Exif, FrameBatches, OnBadFile, find_media, open_annotations
from models import Darknet, parse_cfg
from tests.data.tagged import stored_picture, upright, write_set
from tests.models.cfg_writer import cfg, conv, head
from train_utils.distributed import World, init_distributed_mode
from train_utils.scores.detections import canonical_order

SLICED = ["slices=32", "slice_overlap=0.25"]


@pytest.fixture(scope="module")
def world() -> World:
    return init_distributed_mode("cpu", 60)


@pytest.fixture(scope="module")
def model() -> Darknet:
    """A network that is not trained, and finds much."""
    torch.manual_seed(3)
    network = Darknet(parse_cfg(cfg(conv(8, 3, 2), conv(8, 3, 2), conv(8, 3, 2), head(0, 1)), "small.cfg"), 1)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return network.eval()


def evaluated(folder: Path, model: Darknet, world: World, *options: str) -> np.ndarray:
    """Detections in the set of ``write_set`` in ``folder``, of 40 x 64 pixels and 64 x 40."""
    overrides = ["data=coco", f"data.root={folder}", f"data.index_dir={folder / 'index'}", "data.workers=0"]
    overrides += ["data.val={annotations: set.json, images: images}", "evaluate.batch_size=3"]
    config = compose("train", TrainConfig, [*overrides, *(f"evaluate.{option}" for option in options)])
    annotations = open_annotations(config.data, "val")
    evaluation = Evaluator(annotations, config.evaluate, 64, model, config.data, world)(model)
    return np.zeros(0) if evaluation is None else evaluation.detections


@pytest.mark.parametrize(
    "options",
    [
        ["tta=nms"], ["tta=wbf", "tta_scales=[0.5,1]", "resize=stretch", "clip=false"],
        [*SLICED, "round_boxes=true"], [*SLICED, "slice_whole=false", "tta=nms", "tta_scales=[1]", "rect=false"],
    ],
)  # fmt: skip
def test_any_number_of_processes_finds_the_same_whichever_way_images_are_stored(
    options: list[str], world: World, model: Darknet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_set(tmp_path / "set", DataFormat.coco, "png", True)
    expected = evaluated(tmp_path / "set", model, world, *options)
    assert 100 < len(expected) <= 800 and len(np.unique(expected["image_id"])) == 8
    if "round_boxes=true" in options:
        assert np.array_equal(expected["box_xywh"], np.rint(expected["box_xywh"]))
    for tag in range(1, 9):  # the same pictures saved upright, without a tag
        picture = upright(stored_picture(), tag)
        assert cv2.imwrite(str(tmp_path / "set" / "images" / f"{tag}.png"), picture[..., ::-1])
    parts: list[np.ndarray] = []
    for rank in (2, 1, 0):

        def gathered(part: np.ndarray, rank: int = rank) -> list[np.ndarray] | None:
            parts.insert(0, part)
            return None if rank else parts

        monkeypatch.setattr(building, "gather_arrays", gathered)
        found = evaluated(tmp_path / "set", model, replace(world, rank=rank, world_size=3), *options)
    assert len(parts) == 3 and all(map(len, parts)) and np.array_equal(found, expected)


def test_an_image_that_is_no_larger_than_a_slice_is_evaluated_as_without(
    world: World, model: Darknet, tmp_path: Path
) -> None:
    write_set(tmp_path, DataFormat.coco, "png", True)
    plain = evaluated(tmp_path, model, world)
    sliced = evaluated(tmp_path, model, world, "slices=64")
    assert len(plain) > 100
    assert np.array_equal(canonical_order(plain), canonical_order(sliced))


@pytest.mark.parametrize("options", [SLICED, ["tta=wbf", "tta_scales=[1,1.5]"]])
def test_frames_of_a_video_come_in_order_and_as_from_a_camera(
    options: list[str], world: World, model: Darknet, tmp_path: Path
) -> None:
    path = tmp_path / "clip.avi"
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"MJPG"), 10, (80, 40))
    for noise in np.random.default_rng(0).integers(0, 256, (7, 5, 10, 3), dtype=np.uint8):
        writer.write(np.kron(noise, np.ones((8, 8, 1), dtype=np.uint8)))
    writer.release()
    base = [f"source={path}", "model=yolov3-tiny", "model.weights=a", "confidence=0.02", "device=cpu"]
    config = compose("predict", PredictConfig, [*base, *options], model_or_checkpoint)
    predictor = Predictor(config, TrainedNetwork(model, ["a"], [1], 64, "", ""), world.device)
    for batch_size in (1, 3, 50):
        batches = FrameBatches(find_media(str(path)), predictor.fit, batch_size, Exif.apply, OnBadFile.stop, 2)
        seen = list(predictor.found(batches))
        assert [frame.number for frame, _ in seen] == [*range(1, 8)]
        assert sum(len(found.scores) for _, found in seen) > 20
        for frame, found in seen:
            ((same, alone),) = predictor.found(predictor.fit.batches(frame, batch_size))
            assert same is frame and np.array_equal(alone.classes, found.classes)
            assert np.allclose(alone.boxes_xyxy, found.boxes_xyxy, atol=1e-3)
            assert (found.scores > 0.02).all()
