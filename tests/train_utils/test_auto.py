"""What ``auto`` becomes by machine, training set and weights; which loss ``loss=`` makes."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from conf import CheckpointError, ConfigError
from conf.cli.resume import resumed_options
from conf.compose import compose, to_dictionary
from conf.schema import CHOICES, Precision, TrainConfig
from data import Colour, DataError
from models import Darknet, DarknetLoss, ModelError, Postprocess, YoloLoss, YoloxLoss, parse_cfg, save_darknet_weights
from models.cfg import ZOO
from tests.models.cfg_writer import cfg, conv, head
from train_utils import auto, build, checkpoint, distributed, numerics
from train_utils.distributed import World

CPU = World(0, 0, 1, 1, 1, torch.device("cpu"), "none")
GPU = replace(CPU, device=torch.device("cuda", 0))
HEADS = Darknet(parse_cfg(cfg(conv(8, 3, 2), head(0, 1)), "a.cfg")).heads
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


@pytest.mark.parametrize("side", [960, 1280])
def test_images_that_bins_do_not_reach_across_get_a_line(side: int) -> None:
    config = composed("model=yolov3-tiny-decoupled", "model.width=0.1", f"train.image_size={side}")
    notes = "\n".join(auto.resolve_auto(config, boxes(3), CPU, None)[2])
    line = (
        "warning: 16 bins reach boxes of 960 pixels, and images have 1280: larger boxes are cut. fix: model.box_bins=21"
    )
    assert (line in notes) == ("box_bins" in notes) == (side == 1280)


@pytest.mark.parametrize(
    ("world", "given", "colour"),
    [(CPU, "auto", "cpu"), (GPU, "auto", "device"), (GPU, "cpu", "cpu"), (CPU, "device", "device")],
)
def test_colours_change_where_the_device_is_and_in_a_resumed_run_where_they_did(world, given, colour) -> None:
    config = composed("model=yolov3-tiny", "model.width=0.1", "train.precision=float32", f"augment.colour={given}")
    found = auto.resolve_auto(config, boxes(3), world, None)[0]
    assert found.augment.colour is Colour[colour]
    assert resumed_options(composed(), {"config": to_dictionary(found)}).augment.colour is Colour[colour]


def test_a_resumed_run_keeps_its_precision_or_says_that_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    config = composed("model=yolov3-tiny", "model.width=0.1")
    for native in (True, False):  # bfloat16 on the first machine, on another none
        monkeypatch.setattr(numerics, "has_native_bfloat16", lambda native=native: native)
        found, model, _ = auto.resolve_auto(config, boxes(3), CPU, None)
        assert found.train.precision == ("bfloat16" if native else "float32")
        saved = {"network": build.describe_network(model, config.model), "model": model.state_dict()}
        for precision in ("bfloat16", "float32"):
            of_run = {
                "config": to_dictionary(replace(found, train=replace(found.train, precision=Precision[precision])))
            }
            assert auto.resolve_auto(config, boxes(3), CPU, saved | of_run)[0].train.precision == precision
        old = saved | {"config": to_dictionary(config)}  # of a version that stored ``auto``
        assert auto.resolve_auto(config, boxes(3), CPU, old)[0].train.precision == found.train.precision
    half = {"config": to_dictionary(replace(found, train=replace(found.train, precision=Precision.float16)))}
    with pytest.raises(CheckpointError, match=r"^resume=run: .*float16 needs a GPU\. fix: .*model\.weights=run$"):
        auto.resolve_auto(replace(config, resume="run"), boxes(3), CPU, saved | half)


@pytest.mark.parametrize(("cores", "on_gpu", "on_cpu"), [(1, 1, 1), (2, 1, 2), (8, 7, 2), (16, 15, 2), (128, 16, 2)])
def test_loader_processes_by_cores(monkeypatch: pytest.MonkeyPatch, cores: int, on_gpu: int, on_cpu: int) -> None:
    monkeypatch.setattr(build, "usable_cores", lambda: set(range(cores)))
    assert build.loader_workers("auto", GPU) == on_gpu and build.loader_workers("auto", CPU) == on_cpu
    assert build.loader_workers(0, GPU) == 0 and build.loader_workers(99, CPU) == 99
    assert build.loader_workers("auto", PAIR) == max(1, min(16, cores // 2 - 1)), "ranks share the cores of their node"
    assert build.loader_workers("auto", replace(PAIR, launcher="srun")) == on_gpu, "srun binds each rank to its own"


PAIRS = "10,10, 20,20, 30,30, 40,40, 50,50, 60,60, 70,70, 80,80"
TWO = ([5, 1], [7, 5, 3])  # masks from the finest to the coarsest stride, in any order, with a gap and a repeat


def network(path: Path, masks: tuple[list[int], ...]) -> Path:
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
    heads = Darknet(build.load_network(fitted.model)).heads
    areas = [sorted(width * height for width, height in found.anchors) for found in heads]
    assert all(finer[-1] <= coarser[0] for finer, coarser in pairwise(areas)), areas
    used = {index for mask in masks for index in mask}
    assert all(heads[0].all_anchors[index] == ((index + 1) * 10,) * 2 for index in set(range(8)) - used)


def test_what_varies_the_image_size_does_not_change_the_fit(tmp_path: Path) -> None:
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
        build.load_network(config.model)
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
        said = r"a\.weights were trained with other anchors\. fix: model\.anchors=null"
        with pytest.raises(ConfigError, match=said) if refused else nullcontext():
            build.build_model(config, 2, fitted=True)


@pytest.mark.parametrize("fits", [False, True])
def test_the_heads_of_a_run_on_the_same_data_stand_for_the_same_boxes(fits: bool, tmp_path: Path) -> None:
    given = "model=base", f"model.cfg={network(tmp_path / 'a.cfg', TWO)}", "train.image_size=64"
    images = boxes(300)
    chosen = ["model.anchors=auto"] * fits
    config, model, _ = auto.resolve_auto(composed(*given, *chosen), images, CPU, None)
    state = {
        "network": build.describe_network(model, config.model), "names": ["a", "b"], "category_ids": [1, 2],
        "config": {}, "weights_version": [0, 2, 5], "epoch": 1, "step": 1, "seen": 9, "ema": model.state_dict(),
    }  # fmt: skip
    checkpoint.save_checkpoint(tmp_path / "a.pt", state)
    weights = f"model.weights={tmp_path / 'a.pt'}"
    for more in ((), *[("model.anchors=auto",)] * fits):
        found, again, notes = auto.resolve_auto(composed(*given, weights, *more), images, CPU, None)
        assert again.heads == model.heads == Darknet(again.cfg, 2).heads and found.loss == config.loss
        assert ("the heads keep the anchors of the weights" in notes) == (fits and not more)
    other = f"model.anchors=[{','.join(['[9,9]'] * 8)}]"
    with pytest.raises(ModelError, match=r"a\.pt were trained with other anchors"):
        auto.resolve_auto(composed(*given, weights, other), images, CPU, None)
    fresh, of_cfg = (build.build_model(composed(*given, *more).model, 3)[0].heads for more in ([weights], []))
    assert fresh == of_cfg


def test_the_loss_suits_the_heads_and_takes_the_options_given() -> None:
    far = [replace(head, scale_x_y=6) for head in HEADS]
    for heads, name, given in ((HEADS, "yolov3", "loss.anchor_iou=0.5"), (far, "yolox", "loss.positives_by=cost")):
        found = build.suitable_loss(heads, composed(given, "loss.box=2").loss)
        assert found == composed(f"loss={name}", given, "loss.box=2").loss
        explicit = composed("loss=darknet").loss
        assert build.suitable_loss(heads, found) is found and build.suitable_loss(heads, explicit) is explicit
    for heads, given in ((HEADS, "loss.positives=5"), (far, "loss.anchor_iou=0.5"), (far, "loss.positives=0")):
        with pytest.raises(ConfigError, match=given.partition("=")[0]):
            build.build_loss(heads, composed(given).loss)


def test_the_options_of_suppression_arrive() -> None:
    given = "confidence=0.1", "nms_iou=0.2", "max_detections=3", "merge_nms=true"
    options = replace(composed(*(f"evaluate.{option}" for option in given)).evaluate)
    options.multi_label = False
    for in_training in (False, True):
        made = build.build_postprocess(options, SimpleNamespace(heads=HEADS), [1], in_training)
        assert made == Postprocess(HEADS, 0.1, 0.2, 3, False, merge=True, classes=[1], refuse_nonfinite=not in_training)


def test_nodes_with_other_annotations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    one_set = SimpleNamespace(names=["a", "b"], digest=lambda: "1f")
    monkeypatch.setattr("train_utils.build.data.open_annotations", lambda *_: one_set)
    config: Any = SimpleNamespace(name="coco")
    world = replace(CPU, num_nodes=2)
    assert build.open_split(config, "val", world) == one_set
    for change in ("1f", "2e"), ("'a'", "'c'"):  # a digest, a name
        monkeypatch.setattr(distributed, "broadcast_text", lambda text, change=change: text.replace(*change))
        with pytest.raises(DataError, match=r"coco: val differs between the nodes\. fix: "):
            build.open_split(config, "val", world)


DECOUPLED = ("yolov3-spp-decoupled", "yolov3-tiny-decoupled")


@pytest.mark.release
@pytest.mark.parametrize("name", ZOO)
def test_decoupled_networks_of_the_zoo_learn_bins_by_the_loss_of_yolox_and_others_by_that_of_yolov3(name: str) -> None:
    config = composed(f"model={name}")
    heads = build.build_meta_model(config.model).heads
    loss, bins = ("yolox", 16) if name in DECOUPLED else ("yolox" if name.startswith("yolox") else "yolov3", 0)
    assert build.suitable_loss(heads, config.loss).name == loss and {head.box_bins for head in heads} == {bins}
    if name in DECOUPLED:
        assert all(head.box_bins == 0 for head in build.build_meta_model(replace(config.model, box_bins=0)).heads)


def test_each_choice_of_loss_has_its_class_and_its_learning_rate() -> None:
    heads = [replace(head, scale_x_y=6) for head in HEADS]
    for name, kind in (("yolov3", YoloLoss), ("yolox", YoloxLoss), ("darknet", DarknetLoss)):
        loss = composed(f"loss={name}").loss
        assert type(loss) is CHOICES["loss"][name] and isinstance(build.build_loss(heads, loss), kind)
    assert composed("loss=darknet").optim == composed("optim=darknet").optim
    assert composed("loss=darknet", "optim=sgd").optim == composed("optim=sgd").optim
    assert composed("loss=darknet", "optim.lr=0.5").optim.lr == 0.5
