"""What ``auto`` becomes by machine, training set and weights; which loss ``loss=`` makes."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import ConfigError, auto, build
from conf.build import build_loss, build_model, describe_network, load_network, loader_workers
from conf.entry import compose, to_dictionary
from conf.saved import resumed_options
from conf.schema import CHOICES, TrainConfig
from data import Colour
from models import Darknet, DarknetLoss, LossConfig, ModelError, YoloLoss, parse_cfg, save_darknet_weights
from tests.models.cfg_writer import cfg, conv, head
from train_utils import checkpoint
from train_utils.distributed import World

CPU = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
GPU = replace(CPU, device=torch.device("cuda", 0))
PAIR = replace(GPU, world_size=4, local_world_size=2, num_nodes=2)


@cache
def composed(*overrides: str) -> TrainConfig:
    return compose("train", TrainConfig, list(overrides))


class ASet(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.sizes)


def boxes(count: int) -> Any:
    """``count`` boxes of sizes far from squares in one image of 64 pixels."""
    sizes = np.random.default_rng(0).uniform(1, (30, 3), (count, 2))
    return ASet(
        names=["a", "b"], classes=np.zeros(count, np.int32), crowd=np.zeros(count, bool), offsets=np.array([0, count]),
        boxes_xywh=np.concatenate([np.zeros((count, 2)), sizes], axis=1), sizes=np.array([[64, 64]]),
    )  # fmt: skip


def images_with(count: int, side: float = 200) -> Any:
    """``count`` boxes of ``side`` pixels in one image of 640 x 480, none in the other."""
    return ASet(
        names=["a", "b"], classes=np.zeros(count, np.int32), crowd=np.zeros(count, bool),
        sizes=np.array([[480, 640]] * 2), offsets=np.array([0, count, count]),
        boxes_xywh=np.full((count, 4), side, dtype=float),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("world", "given", "colour"),
    [(CPU, "auto", "cpu"), (GPU, "auto", "device"), (GPU, "cpu", "cpu"), (CPU, "device", "device")],
)
def test_colours_change_where_the_device_is_and_in_a_resumed_run_where_they_did(
    world: World, given: str, colour: str
) -> None:
    config = composed("model=yolov3-tiny", "model.width=0.1", f"augment.colour={given}")
    found = auto.resolve_auto(config, boxes(3), world, None)[0]
    assert found.augment.colour is Colour[colour]
    assert resumed_options(composed(), {"config": to_dictionary(found)}).augment.colour is Colour[colour]


@pytest.mark.parametrize(("cores", "on_gpu", "on_cpu"), [(1, 1, 1), (2, 1, 2), (8, 7, 2), (16, 15, 2), (128, 16, 2)])
def test_loader_processes_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, on_gpu: int, on_cpu: int) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: set(range(cores)))
    assert loader_workers("auto", GPU) == on_gpu and loader_workers("auto", CPU) == on_cpu
    assert loader_workers(0, GPU) == 0 and loader_workers(99, CPU) == 99
    assert loader_workers("auto", PAIR) == max(1, min(16, cores // 2 - 1)), "ranks share the cores of their node"
    assert loader_workers("auto", replace(PAIR, launcher="srun")) == on_gpu, "srun binds each rank to its own"


PAIRS = "10,10, 20,20, 30,30, 40,40, 50,50, 60,60, 70,70, 80,80"
TWO = ([5, 1], [7, 5, 3])  # masks from the finest to the coarsest stride, in any order, with a gap and a repeat


def network(path: Path, masks: tuple[list[int], ...]) -> Path:
    """A .cfg with a head at each of the strides 2, 4, 8, ..."""
    parts = [conv(8, 3, 2) + head(*mask, anchors=PAIRS, num=8) for mask in masks]
    join = "[route]\nlayers=-3\n"  # the map before a head
    path.write_text(cfg(join.join(parts)))
    return path


def with_auto(path: Path, *more: str) -> TrainConfig:
    own = "model=base", f"model.cfg={path}", "model.anchors=auto", "train.image_size=64"
    return composed(*own, *more)


@pytest.mark.parametrize("masks", [TWO, ([7, 0], [6, 1], [5, 2], [4, 3])])
def test_finer_heads_get_smaller_anchors(tmp_path: Path, masks: tuple[list[int], ...]) -> None:
    config = with_auto(network(tmp_path / "a.cfg", masks))
    state = torch.get_rng_state()
    fitted, note = auto.fit_anchors(config, CPU, boxes(300))
    assert torch.equal(torch.get_rng_state(), state), "the initial weights would be others"
    assert note is not None and note.startswith("model.anchors=auto: recall at IoU 0.5 is 0."), note
    heads = Darknet(load_network(fitted.model)).heads
    areas = [sorted(width * height for width, height in found.anchors) for found in heads]
    assert all(finer[-1] <= coarser[0] for finer, coarser in pairwise(areas)), areas
    used = {index for mask in masks for index in mask}
    assert all(heads[0].all_anchors[index] == ((index + 1) * 10,) * 2 for index in set(range(8)) - used)


def test_what_varies_the_image_size_does_not_change_the_fit(tmp_path: Path) -> None:
    """The size itself does, and the overlap that the loss asks for decides whether to fit."""
    path = network(tmp_path / "a.cfg", TWO)

    def fitted(*more: str) -> Any:
        return auto.fit_anchors(with_auto(path, *more), CPU, boxes(300))[0].model.anchors

    expected = fitted()
    assert expected is not None
    for option in ("train.rect=true", "train.multi_scale=[0.5,1.5]", "loss=darknet"):
        assert fitted(option) == expected, option
    assert fitted("train.image_size=128") not in (None, expected)
    assert fitted("loss.anchor_iou=0.01") is None


def test_without_boxes_the_anchors_stay_and_other_programs_refuse_auto(tmp_path: Path) -> None:
    config = with_auto(network(tmp_path / "a.cfg", TWO))
    fitted, note = auto.fit_anchors(config, CPU, boxes(0))
    assert fitted.model.anchors is None and "there are no boxes to fit to" in str(note)
    with pytest.raises(ModelError, match=r"model\.anchors=auto is for train\.py"):
        load_network(config.model)
    second = head(0, anchors="1,2, 3,4")
    (tmp_path / "b.cfg").write_text(network(tmp_path / "a.cfg", ([0],)).read_text() + "[route]\nlayers=-3\n" + second)
    with pytest.raises(ConfigError, match=r"needs a \.cfg whose \[yolo\] sections all list the same"):
        auto.fit_anchors(with_auto(tmp_path / "b.cfg"), CPU, boxes(9))


def test_heads_that_learnt_with_another_decoding_are_refused(tmp_path: Path) -> None:
    path, weights = network(tmp_path / "a.cfg", TWO), tmp_path / "a.weights"
    config = with_auto(path, f"model.weights={weights}", "model.anchors=null").model
    model = Darknet(path, 2)
    for up_to, refused in ((None, True), (2, True), (1, False)):  # whole, to the first head, before it
        save_darknet_weights(model, weights, up_to)
        for key, changed, fitted in (("anchors", config, True), ("scale_x_y", replace(config, scale_x_y=2.0), False)):
            if refused:
                said = rf"a\.weights were trained with other {key}\. fix: model\.{key}=null"
                with pytest.raises(ConfigError, match=said):
                    build_model(changed, 2, fitted=fitted)
            else:
                build_model(changed, 2, fitted=fitted)
    assert [head.scale_x_y for head in build_model(replace(config, scale_x_y=2.0, weights=None), 2)[0].heads] == [2, 2]


@pytest.mark.parametrize(
    ("count", "side", "given", "decided"),
    [
        (2, 200, "", (200, "damped")), (3, 200, "", (37.4, "equal")), (2, 100, "", (37.4, "equal")),
        (0, 200, "", (37.4, "equal")), (2, 200, "loss.classification=50", (50, "damped")),
        (2, 200, "loss.balance=equal", (200, "equal")), (2, 200, "loss=yolov3_pooled", (200, "pooled")),
    ],
)  # fmt: skip
def test_the_loss_suits_images_that_hold_few_large_objects(
    count: int, side: int, given: str, decided: tuple[float, str]
) -> None:
    config, images = composed(*given.split()), images_with(count, side)
    found, notes = auto.choose_loss(config, images)
    assert isinstance(found.loss, LossConfig) and (found.loss.classification, found.loss.balance) == decided
    assert ("loss.classification=200" in "".join(notes)) == (decided[0] == 200)
    few = (count, side) == (2, 200)
    assert (found.loss.positives, found.loss.positives_by) == ((10, "cost") if few else (None, "shape"))
    assert found.model.scale_x_y == (2 if few else None)
    assert auto.choose_loss(found, images_with(0)) == (found, []), "what is decided stays"
    images.names = ["one"]
    assert auto.choose_loss(config, images)[1] == [], "there is nothing to tell apart"
    darknet = composed("loss=darknet")
    assert auto.choose_loss(darknet, images) == (darknet, [])


def test_few_large_objects_have_more_positives_unless_told_otherwise() -> None:
    for given, *decided in (
        ("model.weights=a.weights", 10, "cost", 2), ("model.scale_x_y=1.5", 10, "cost", 1.5),
        ("loss.positives=5", 5, "overlap", None), ("loss.positives_by=shape", None, "shape", None),
    ):  # fmt: skip
        found, _ = auto.choose_loss(composed(given), images_with(1))
        assert isinstance(found.loss, LossConfig)
        assert [found.loss.positives, found.loss.positives_by, found.model.scale_x_y] == decided


@pytest.mark.parametrize(
    ("scale", "kept", "given", "decided", "reach"),
    [
        (1, False, (), "cost", 2), (1, True, (), "shape", 1), (3, True, (), "cost", 3),
        (1, False, ("model.scale_x_y=1.5",), "cost", 1.5), (1, False, ("loss=darknet",), None, 1),
    ],
)  # fmt: skip
def test_new_heads_reach_their_neighbours_and_those_of_the_weights_stay(
    scale: float, kept: bool, given: tuple[str, ...], decided: str | None, reach: float, tmp_path: Path
) -> None:
    """The network, its .cfg's text and the options agree."""
    path, weights = tmp_path / "a.cfg", tmp_path / "a.weights"
    path.write_text(cfg(conv(8, 3, 2), head(0, 1, scale_x_y=scale)))
    save_darknet_weights(Darknet(path, 2), weights)
    given = "model=base", f"model.cfg={path}", *([f"model.weights={weights}"] if kept else []), *given
    found, model, notes = auto.resolve_auto(composed(*given), images_with(2), CPU, None)
    assert getattr(found.loss, "positives_by", None) == decided
    assert [head.scale_x_y for head in model.heads] == [reach]
    assert [head.scale_x_y for head in Darknet(model.cfg).heads] == [reach]
    assert found.model.scale_x_y == (reach if reach != scale else None)
    assert any("loss.positives_by=cost" in note for note in notes) == (decided == "cost")


@pytest.mark.parametrize("fits", [False, True])
def test_the_heads_of_a_run_on_the_same_data_stand_for_the_same_boxes(fits: bool, tmp_path: Path) -> None:
    """Also if auto chose them; those of other classes do not, and other options are refused."""
    given = "model=base", f"model.cfg={network(tmp_path / 'a.cfg', TWO)}", "train.image_size=64"
    images = boxes(300) if fits else images_with(2)
    chosen = ["model.anchors=auto", "model.scale_x_y=1.5"] * fits
    config, model, _ = auto.resolve_auto(composed(*given, *chosen), images, CPU, None)
    state = {
        "network": describe_network(model, config.model), "names": ["a", "b"], "category_ids": [1, 2], "config": {},
        "weights_version": [0, 2, 5], "epoch": 1, "step": 1, "seen": 9, "ema": model.state_dict(),
    }  # fmt: skip
    checkpoint.save_checkpoint(tmp_path / "a.pt", state)
    weights = f"model.weights={tmp_path / 'a.pt'}"
    for more in ((), *[("model.scale_x_y=1.5",), ("model.anchors=auto",)] * fits):
        found, again, notes = auto.resolve_auto(composed(*given, weights, *more), images, CPU, None)
        assert again.heads == model.heads == Darknet(again.cfg, 2).heads and found.loss == config.loss
        assert "the heads keep anchors and scale_x_y of the weights" in notes
    for key, other in (("scale_x_y", "1.25"), ("anchors", f"[{','.join(['[9,9]'] * 8)}]")):
        with pytest.raises(ModelError, match=rf"a\.pt were trained with other {key}"):
            auto.resolve_auto(composed(*given, weights, f"model.{key}={other}"), images, CPU, None)
    fresh, of_cfg = (build_model(composed(*given, *more).model, 3)[0].heads for more in ([weights], []))
    assert fresh == of_cfg


def test_rare_classes_weigh_more_and_the_boxes_as_much_as_before() -> None:
    """Four boxes of the first class, one of the second, crowds and none of the others."""
    classes, crowd = np.array([0, 0, 1, 0, 0, 2], np.int32), np.array([False] * 5 + [True])
    images = images_with(6)
    images.names, images.classes, images.crowd = ["a", "b", "c", "d"], classes, crowd
    found, notes = auto.choose_loss(composed("loss.class_weights=auto"), images)
    assert isinstance(found.loss, LossConfig)
    a, *others = found.loss.class_weights
    assert others == [pytest.approx(2 * a, abs=1e-3)] * 3 and 4 * a + others[0] == pytest.approx(5, abs=1e-3)
    assert notes[-1] == "loss.class_weights=auto: from 0.8333 for a to 1.6667 for b"
    found, _ = auto.choose_loss(composed("loss.class_weights=[1,2]"), images)
    assert isinstance(found.loss, LossConfig) and found.loss.class_weights == [1, 2]


def test_each_choice_of_loss_has_its_class_and_its_learning_rate() -> None:
    heads = Darknet(parse_cfg(cfg(conv(8, 3, 2), head(0, 1)), "a.cfg")).heads
    for name, kind in (("yolov3", YoloLoss), ("darknet", DarknetLoss)):
        loss = composed(f"loss={name}").loss
        assert type(loss) is CHOICES["loss"][name] and isinstance(build_loss(heads, loss), kind)
    assert composed("loss=darknet").optim == composed("optim=darknet").optim
    assert composed("loss=darknet", "optim=sgd").optim == composed("optim=sgd").optim
    assert composed("loss=darknet", "optim.lr=0.5").optim.lr == 0.5
    assert composed("experiment=quickstart").loss == composed("loss=yolov3_pooled").loss
