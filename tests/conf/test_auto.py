"""What ``auto`` becomes on this machine or that, on all ranks alike, and in a resumed run."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import auto, batches
from conf.batches import loader_workers
from conf.entry import compose, to_dictionary
from conf.failures import ConfigError
from conf.network import build_model, load_network
from conf.resume import resumed_options
from conf.schema import TrainConfig
from data import Colour
from models import Darknet, ModelError, save_darknet_weights
from tests.models.cfg_writer import cfg, conv, head
from train_utils.distributed import World

CPU = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
GPU = replace(CPU, device=torch.device("cuda", 0))
PAIR = replace(GPU, world_size=4, local_world_size=2, num_nodes=2)


def resolved(world: World, *options: str, saved: str | None = None) -> Colour:
    config = compose("train", TrainConfig, ["model=yolov3-tiny", "model.width=0.1", *options])
    if saved is not None:
        return resumed_options(config, {"config": to_dictionary(compose("train", TrainConfig, [saved]))}).augment.colour
    found, _, _ = auto.resolve_auto(config, boxes(3), world, None)
    return found.augment.colour


def test_colours_change_where_the_device_is() -> None:
    assert resolved(CPU) is Colour.cpu and resolved(GPU) is Colour.device
    assert resolved(GPU, "augment.colour=cpu") is Colour.cpu
    assert resolved(CPU, "augment.colour=device") is Colour.device


def test_a_resumed_run_changes_colours_where_it_did() -> None:
    assert resolved(GPU, saved="augment.colour=cpu") is Colour.cpu
    assert resolved(CPU, saved="augment.colour=device") is Colour.device


def test_ranks_share_the_cores_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "usable_cores", lambda: set(range(16)))
    assert loader_workers("auto", PAIR) == 7 and loader_workers("auto", GPU) == 15
    assert loader_workers("auto", replace(PAIR, launcher="srun")) == 15, "srun binds each rank to its own"


@pytest.mark.parametrize(("cores", "on_gpu", "on_cpu"), [(1, 1, 1), (2, 1, 2), (8, 7, 2), (16, 15, 2), (128, 16, 2)])
def test_loader_processes_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, on_gpu: int, on_cpu: int) -> None:
    monkeypatch.setattr(batches, "usable_cores", lambda: set(range(cores)))
    assert loader_workers("auto", GPU) == on_gpu and loader_workers("auto", CPU) == on_cpu
    assert loader_workers(0, GPU) == 0 and loader_workers(99, CPU) == 99


PAIRS = "10,10, 20,20, 30,30, 40,40, 50,50, 60,60, 70,70, 80,80"
HEADS = {  # from the finest to the coarsest stride: masks in any order, with a gap, a repeat and each anchor
    "two": ([5, 1], [7, 5, 3]),
    "three": ([6, 7], [0, 1], [3]),
    "four": ([7, 0], [6, 1], [5, 2], [4, 3]),
}


def network(path: Path, masks: tuple[list[int], ...], anchors: str = PAIRS) -> Path:
    """A .cfg with a head at each of the strides 2, 4, 8, ..."""
    parts = [conv(8, 3, 2) + head(*mask, anchors=anchors, num=8) for mask in masks]
    join = "[route]\nlayers=-3\n"  # the map before a head
    path.write_text(cfg(join.join(parts)))
    return path


class ASet(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.sizes)


def boxes(count: int) -> Any:
    sizes = np.random.default_rng(0).uniform(1, (30, 3), (count, 2))  # far from squares
    return ASet(
        names=["a", "b"], classes=np.zeros(count, np.int32), crowd=np.zeros(count, bool), offsets=np.array([0, count]),
        boxes_xywh=np.concatenate([np.zeros((count, 2)), sizes], axis=1), sizes=np.array([[64, 64]]),
    )  # fmt: skip


def with_auto(path: Path, *more: str) -> TrainConfig:
    own = (
        "model=base",
        f"model.cfg={path}",
        "model.anchors=auto",
        "train.image_size=64",
        f"data.index_dir={path}.index",
    )
    return compose("train", TrainConfig, [*own, *more])


@pytest.mark.parametrize("name", HEADS)
def test_finer_heads_get_smaller_anchors(tmp_path: Path, name: str) -> None:
    config = with_auto(network(tmp_path / "a.cfg", HEADS[name]))
    state = torch.get_rng_state()
    fitted, note = auto.fit_anchors(config, CPU, boxes(300))
    assert torch.equal(torch.get_rng_state(), state), "the initial weights would be others"
    assert note is not None and note.startswith("model.anchors=auto: recall at IoU 0.5 is 0."), note
    heads = Darknet(load_network(fitted.model)).heads
    areas = [sorted(width * height for width, height in found.anchors) for found in heads]
    assert all(finer[-1] <= coarser[0] for finer, coarser in pairwise(areas)), areas
    used = {index for mask in HEADS[name] for index in mask}
    assert all(heads[0].all_anchors[index] == ((index + 1) * 10,) * 2 for index in set(range(8)) - used)


def test_what_varies_the_image_size_does_not_change_the_fit(tmp_path: Path) -> None:
    """The size itself does, and the overlap that the loss asks for decides whether to fit."""
    path = network(tmp_path / "a.cfg", HEADS["two"])

    def fitted(*more: str) -> tuple[Any, str | None]:
        config, note = auto.fit_anchors(with_auto(path, *more), CPU, boxes(300))
        return config.model.anchors, note

    expected = fitted()
    assert expected[0] is not None
    same = "train.rect=true", "train.multi_scale=[0.5,1.5]", "augment.scale=0.5", "data.single_class=true"
    for option in same:
        assert fitted(option) == expected, option
    assert fitted("train.image_size=128")[0] not in (None, expected[0])
    assert fitted("loss.anchor_iou=0.01")[0] is None
    assert fitted("loss=darknet") == expected


def test_without_boxes_the_anchors_stay_and_other_programs_refuse_auto(tmp_path: Path) -> None:
    config = with_auto(network(tmp_path / "a.cfg", HEADS["two"]))
    fitted, note = auto.fit_anchors(config, CPU, boxes(0))
    assert fitted.model.anchors is None and note == (
        "model.anchors=auto: there are no boxes to fit to, so the anchors of the .cfg stay"
    )
    with pytest.raises(ModelError, match=r"model\.anchors=auto is for train\.py"):
        load_network(config.model)
    second = head(0, anchors="1,2, 3,4")
    (tmp_path / "b.cfg").write_text(network(tmp_path / "a.cfg", ([0],)).read_text() + "[route]\nlayers=-3\n" + second)
    with pytest.raises(
        ConfigError, match=r"model\.anchors=auto needs a \.cfg whose \[yolo\] sections all list the same"
    ):
        auto.fit_anchors(with_auto(tmp_path / "b.cfg"), CPU, boxes(9))


def test_heads_that_learnt_with_another_decoding_are_refused_unless_left_out(tmp_path: Path) -> None:
    path, weights = network(tmp_path / "a.cfg", HEADS["two"]), tmp_path / "a.weights"
    config = with_auto(path, f"model.weights={weights}", "model.anchors=null").model
    model = Darknet(path, 2)
    for up_to, refused in ((None, True), (2, True), (1, False)):  # whole, to the first head, before it
        save_darknet_weights(model, weights, up_to)
        for key, changed, fitted in (("anchors", config, True), ("scale_x_y", replace(config, scale_x_y=2.0), False)):
            if refused:
                with pytest.raises(
                    ConfigError, match=rf"a\.weights were trained with other {key}\. fix: model\.fresh_heads=true"
                ):
                    build_model(changed, 2, fitted=fitted)
            else:
                build_model(changed, 2, fitted=fitted)
            build_model(replace(changed, fresh_heads=True), 2, fitted=fitted)
    assert [head.scale_x_y for head in build_model(replace(config, scale_x_y=2.0, weights=None), 2)[0].heads] == [2, 2]
