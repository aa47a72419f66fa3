"""Files of weights: every value in its place, and nothing loaded if one misfits or is damaged."""

import copy
import random
import re
import zipfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import models
from conf import CheckpointError
from data import read_names
from models import Darknet, ModelError, load_darknet_weights, parse_cfg, save_darknet_weights, zoo_cfg
from models.config import COCO_NAMES
from models.darknet import fuse_batch_norm
from models.weights import ClassNames, class_order, load_weights_of_checkpoint, read_tensor_file, weight_tensors
from tests.models.cfg_writer import conv, head, section
from tests.models.small_network import PlainNetwork, randomise, small
from tests.runs.test_attack import DAMAGES
from train_utils.build import own_checkpoint
from train_utils.checkpoint import FORMAT, peek_config


def described(model: Darknet) -> dict[str, Any]:
    return {"cfg": model.cfg.text, "source": model.cfg.source, "num_classes": model.num_classes, "width": 0.1}


def tiny(num_classes: int = 3, width: float = 0.1, name: str = "yolov3-tiny") -> Darknet:
    return Darknet(zoo_cfg(name), num_classes=num_classes, width=width)


def values_of(model: Darknet) -> list[Tensor]:
    """The values of a .weights file in Darknet's order, from the torch modules of each layer."""
    found = []
    for layer in model.layers:
        for convolution in (module for module in layer.modules() if isinstance(module, nn.Conv2d)):
            norms = [module for module in layer.modules() if isinstance(module, nn.BatchNorm2d)]
            for norm in norms:
                found += [norm.bias, norm.weight, norm.running_mean, norm.running_var]
            found += [convolution.weight] if norms else [convolution.bias, convolution.weight]
    return [tensor.detach() for tensor in found]


def write(path: Path, tensors: list[Tensor], version: tuple[int, int, int] = (0, 2, 5), seen: int = 2**40) -> Path:
    wide = version[0] * 10 + version[1] >= 2
    header = np.array(version, "<i4").tobytes() + np.array([seen], "<u8" if wide else "<u4").tobytes()
    path.write_bytes(header + b"".join(tensor.numpy().astype("<f4").tobytes() for tensor in tensors))
    return path


def all_equal(one: Darknet, other: Darknet) -> bool:
    return all(a.equal(b) for a, b in zip(values_of(one), values_of(other), strict=True))


def test_every_value_has_its_place(tmp_path: Path) -> None:
    text = section("net", channels=2) + conv(4, 3, activation="mish", groups=2) + head(0, anchors="4,6", classes=1)
    model = Darknet(parse_cfg(text, "small.cfg"))
    count = 4 * 4 + 4 * 1 * 9 + 6 + 6 * 4
    load_darknet_weights(model, write(tmp_path / "a.weights", [torch.arange(float(count))]))
    first, second = model.layers[0], model.layers[1]
    assert first.norm.bias.tolist() == [0, 1, 2, 3]
    assert first.norm.weight.tolist() == [4, 5, 6, 7]
    assert first.norm.running_mean.tolist() == [8, 9, 10, 11]
    assert first.norm.running_var.tolist() == [12, 13, 14, 15]
    assert first.conv.weight.flatten().tolist() == list(range(16, 52))
    assert second.conv.bias.tolist() == list(range(52, 58))
    assert second.conv.weight[1].flatten().tolist() == [62, 63, 64, 65]


@pytest.mark.parametrize(("stored", "ours"), [(80, 3), (1, 3)])
@pytest.mark.parametrize(("network", "loaded"), [("yolov3-tiny", 11), ("yolov3-tiny-decoupled", 21)])
def test_other_heads_keep_everything_else(network: str, loaded: int, stored: int, ours: int, tmp_path: Path) -> None:
    source, model = randomise(tiny(stored, name=network)), tiny(ours, name=network)
    untouched = copy.deepcopy(model)
    report = load_darknet_weights(model, write(tmp_path / "a.weights", values_of(source)))
    assert (len(report.loaded), report.num_classes, report.is_whole) == (loaded, stored, False)
    assert f"its heads were left out and start fresh (for {stored} classes, here {ours})" in str(report)
    heads = {head.parts[-1].layer for head in model.heads}
    theirs, before = (dict((name, tensor) for _, name, tensor in weight_tensors(m)) for m in (source, untouched))
    for layer, name, tensor in weight_tensors(model):
        assert tensor.equal(before[name] if layer in heads else theirs[name]), name


def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    source, model = randomise(tiny()), tiny()
    good, before = write(tmp_path / "good.weights", values_of(source)).read_bytes(), copy.deepcopy(model)
    infinite = bytearray(good)
    infinite[-4:] = np.float32("inf").tobytes()
    for content, message in (
        (good[:-4], r"holds [\d,]+ values, this network with 3 classes and width 0\.1 needs"),
        (bytes(infinite), r"layers\.22\.conv\.weight has values that are not finite"),
        (good[:-5000] + bytes(5000), r"layers\.22\.conv\.weight is all zeros"),
        (b"PK\x03\x04" + good[4:], r"not a Darknet .weights file.* end in \.pt"),
        (b"<!DOCTYPE html>\n<html>", "it begins with b'<!DOCTYPE"),
    ):
        path = tmp_path / "bad.weights"
        path.unlink(missing_ok=True)  # a file that is mapped must not shrink
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load_darknet_weights(model, path)
    with pytest.raises(ModelError, match=r"cannot read the weights .*none\.weights"):
        load_darknet_weights(model, tmp_path / "none.weights")
    assert all_equal(before, model) and model.seen == 0


@pytest.mark.parametrize(("name", "value"), [("norm.running_var", -1e-3), ("norm.weight", 1e20), ("conv.weight", -1e9)])
def test_weights_of_another_network_are_refused_by_their_values(name: str, value: float, tmp_path: Path) -> None:
    """As many values in another order: no size tells, but variances and magnitudes do."""
    source, model = randomise(tiny()), tiny()
    source.layers[2].state_dict()[name].view(-1)[0] = value
    state, path = source.state_dict(), tmp_path / "a.pt"
    before = copy.deepcopy(model)
    for load in (
        lambda: load_darknet_weights(model, write(tmp_path / "a.weights", values_of(source))),
        lambda: models.load_foreign_state_dict(model, state, path),
        lambda: load_weights_of_checkpoint(model, state, path, described(source)),
        lambda: models.network_of_checkpoint(described(source), path, state),
    ):
        with pytest.raises(ModelError, match=rf"layers\.2\.{name} has .* of another network\. fix: "):
            load()
    assert all_equal(before, model)
    steps = randomise(tiny()).state_dict()
    steps["layers.2.norm.num_batches_tracked"] += 10**7
    models.network_of_checkpoint(described(source), path, steps)


def test_a_file_cut_behind_any_layer_is_a_beginning_of_the_whole_and_loads(tmp_path: Path) -> None:
    source = randomise(tiny())
    source.seen = 12345
    save_darknet_weights(source, tmp_path / "whole.weights")
    whole = (tmp_path / "whole.weights").read_bytes()
    theirs = dict((name, tensor) for _, name, tensor in weight_tensors(source))
    for end in (1, 2, 9, 15, 16, 22, 23, 24):
        path = tmp_path / f"tiny.conv.{end}"
        save_darknet_weights(source, path, up_to_layer=end)
        stored = [tensor for layer, _, tensor in weight_tensors(source) if layer < end]
        assert path.read_bytes() == whole[: 20 + 4 * sum(tensor.numel() for tensor in stored)]
        model = tiny()
        before = {name: tensor.clone() for _, name, tensor in weight_tensors(model)}
        report = load_darknet_weights(model, path)
        assert (report.is_whole, model.seen) == (end > 22, 12345)
        for layer, name, tensor in weight_tensors(model):
            assert tensor.equal(theirs[name] if layer < end else before[name]), (end, name)


def test_a_refused_save_leaves_the_old_file(tmp_path: Path) -> None:
    path, model = tmp_path / "a.weights", tiny()
    save_darknet_weights(model, path)
    old = path.read_bytes()
    for end in (0, 25, -1):
        with pytest.raises(ModelError, match=rf"up_to_layer must be between 1 and this network's 24 layers, got {end}"):
            save_darknet_weights(tiny(), path, up_to_layer=end)
    model.layers[2].conv.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layers\.2\.conv\.weight has values that are not finite"):
        save_darknet_weights(model, path)
    assert path.read_bytes() == old and [file.name for file in tmp_path.iterdir()] == ["a.weights"]


def test_state_dict_of_a_checkpoint_with_and_without_heads(tmp_path: Path) -> None:
    source, same, other = randomise(tiny(3)), tiny(3), tiny(5)
    path, network = tmp_path / "a.pt", described(source)
    load_weights_of_checkpoint(same, source.state_dict(), path, network)
    assert all_equal(source, same)
    text = source.cfg.text.replace("mask=3,4,5", "mask=3,4")
    fewer = Darknet(parse_cfg(text, "fewer.cfg"), 3, width=0.1)
    assert load_weights_of_checkpoint(fewer, source.state_dict(), path, network).heads_left_out
    odd = source.state_dict() | {"layers.15.conv.bias": torch.zeros(7)}
    with pytest.raises(ModelError, match=r"layers\.15\.conv\.bias needs shape \(24,\), the file has shape \(7,\)"):
        load_weights_of_checkpoint(tiny(3), odd, path, network)
    scaled = Darknet(parse_cfg(source.cfg.text.replace("num=6", "num=6\nscale_x_y=1.05"), "scaled.cfg"), 2, width=0.1)
    partly = ClassNames(["a", "b", "c"], ["a", "z"], partial=True)
    assert load_weights_of_checkpoint(scaled, source.state_dict(), path, network, partly).heads_left_out
    load_weights_of_checkpoint(other, source.state_dict(), path, network)
    assert other.layers[13].conv.weight.equal(source.layers[13].conv.weight)
    with pytest.raises(ModelError, match=r"layers\.2\..* fix: set model\.cfg, model\.width"):
        load_weights_of_checkpoint(tiny(3, width=0.5), source.state_dict(), path, network)


@pytest.mark.parametrize("network", ["yolov3-tiny", "yolov3-tiny-decoupled"])
def test_rows_of_classes_follow_their_names(network: str, tmp_path: Path) -> None:
    source, image = randomise(tiny(3, name=network)).eval(), torch.rand(1, 3, 64, 64)
    path, state, file = tmp_path / "a.pt", source.state_dict(), described(source)

    def load(*names: str, of_file: str = "red blue green") -> tuple[Darknet, str]:
        model = tiny(3, name=network)
        found = load_weights_of_checkpoint(model, state, path, file, ClassNames(of_file.split(), names))
        return model.eval(), str(found)

    moved, text = load("green", "red", "blue")
    assert "3 of 3 classes by name: green, red, blue" in text
    for raw, expected in zip(moved(image), source(image), strict=True):
        torch.testing.assert_close(raw[..., :-3], expected[..., :-3])
        torch.testing.assert_close(raw[..., -3:], expected[..., -3:][..., [2, 0, 1]])
    order = ClassNames("red blue green".split(), "green red blue".split())
    as_darknet = tiny(3, name=network)
    load_darknet_weights(as_darknet, write(tmp_path / "a.weights", values_of(source)), order)
    assert all_equal(as_darknet, moved)
    fresh, text = load("red", "blue", "cat")
    assert not fresh.layers[source.heads[0].parts[-1].layer].conv.weight.equal(
        source.layers[source.heads[0].parts[-1].layer].conv.weight
    )
    assert "start fresh; its classes are red, blue, green, here red, blue, cat" in text
    for names, of_file in (
        (["a", "b", "c"], "0 1 2"),
        (["0", "1", "2"], "red blue green"),
    ):  # numbers do not name classes
        unnamed, text = load(*names, of_file=of_file)
        assert all_equal(source, unnamed) and "names" not in text


@pytest.mark.parametrize("network", ["yolov3-tiny", "yolov3-tiny-decoupled"])
def test_heads_for_other_classes_keep_boxes_and_the_rows_of_names_that_both_have(network: str, tmp_path: Path) -> None:
    source, fresh = randomise(tiny(4, name=network)).eval(), tiny(3, name=network).eval()
    image = torch.rand(1, 3, 64, 64)
    path, file = tmp_path / "a.pt", write(tmp_path / "a.weights", values_of(source))
    state, known = source.state_dict(), ["red", "blue", "green", "grey"]

    def load(*names: str, of_file: list[str] = known, partial: bool = True) -> tuple[Darknet, str]:
        one, two, three = (copy.deepcopy(fresh) for _ in range(3))
        classes = ClassNames(of_file, names, partial)
        report = load_weights_of_checkpoint(one, state, path, described(source), classes)
        models.load_foreign_state_dict(two, state, path, classes)
        load_darknet_weights(three, file, classes)
        assert all_equal(one, two) and all_equal(one, three)
        return one, str(report)

    model, text = load("blue", "cat", "red")
    assert text.endswith("; its heads kept boxes, objectness and 2 of 3 classes by name: blue, red; fresh: cat")
    for raw, theirs in zip(model(image), source(image), strict=True):
        torch.testing.assert_close(raw[..., :-3], theirs[..., :-4])
        torch.testing.assert_close(raw[..., [-3, -1]], theirs[..., [-3, -4]])
    layers = [head.parts[-1].layer for head in model.heads]
    for name in (f"layers.{layer}.conv.{kind}" for layer in layers for kind in ("weight", "bias")):
        ours, own = (net.state_dict()[name].unflatten(0, (len(net.heads[0].anchors), -1)) for net in (model, fresh))
        assert ours[:, -2].equal(own[:, -2])
    assert "0 of 3 classes by name: none; fresh: a, b, c" in load("a", "b", "c")[1]
    assert load("red", "blue", "green")[1].endswith("3 of 3 classes by name: red, blue, green")
    for left_out, text in (
        load("blue", "cat", "red", partial=False),
        load("blue", "cat", "red", of_file=["0", "1", "2", "3"]),
        load("0", "1", "2"),
    ):
        assert "its heads were left out and start fresh (for 4 classes, here 3); its classes are" in text
        assert all(left_out.layers[layer].conv.weight.equal(fresh.layers[layer].conv.weight) for layer in layers)


def test_classes_are_found_by_name() -> None:
    coco, _ = read_names(COCO_NAMES)
    assert [coco[number] for number in class_order(coco, sorted(coco))] == sorted(coco)
    assert class_order(coco, [f"mine {number}" for number in range(80)]) is None
    assert class_order(["0", "1"], ["b", "a"]) == class_order(["b", "a"], ["0", "1"]) == [0, 1]
    assert class_order(["1", "0"], ["0", "1"]) == [1, 0]
    assert class_order(coco, ["car", "couch", "tv"]) == class_order(coco, ["car", "sofa", "tvmonitor"])
    assert class_order(["sofa", "couch", "motorbike"], ["couch", "sofa"]) == [1, 0]
    assert class_order(["motorcycle"], ["motorbike"]) == [0]
    assert class_order(["sofa", "car"], ["sofa", "couch"]) is None, "one class for two"


def _laughs() -> list[Any]:
    many: list[Any] = ["lol"]
    for _ in range(60):
        many = [many, many]
    return many


def _endless() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


@pytest.mark.release
@pytest.mark.parametrize(
    "content", [_laughs(), _endless(), torch.zeros(1).expand(15 * 10**8), [torch.zeros(99)] * 50_000, None]
)
def test_a_small_file_cannot_hold_much(content: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("models.weights.MAX_ENTRIES", 100_000)  # a tenth takes a tenth of the time
    path = tmp_path / "a.pt"
    if content is None:  # an OrderedDict whose .get is None
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", b"\x80\x02ccollections\nOrderedDict\n)R}X\x03\x00\x00\x00getNsb.")
            file.writestr("archive/version", b"3\n")
    else:
        head = {"format": FORMAT, "version": 1, "digest": "0" * 64}
        torch.save({**head, "state": {"config": {"names": content}}}, path)
    for read in (own_checkpoint, peek_config):
        with suppress(ModelError, CheckpointError):
            read(path)
            assert content is None  # which says nothing about a checkpoint


def test_a_network_with_another_bn_eps_gives_and_takes_weights_that_compute_the_same(tmp_path: Path) -> None:
    plain, images = small(), torch.rand(1, 3, 32, 32)
    text = plain.cfg.text.replace("channels=3", "channels=3\nbn_eps=0.3")
    source = randomise(Darknet(parse_cfg(text, "eps.cfg"))).eval()
    report = load_weights_of_checkpoint(plain, source.state_dict(), Path("a.pt"), described(source) | {"width": 1})
    assert report.is_whole
    with torch.no_grad():
        expected = source(images)
        for ours, fused, theirs in zip(plain(images), fuse_batch_norm(source)(images), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(fused, theirs, rtol=1e-5, atol=1e-5)
    with pytest.raises(ModelError, match=r"Darknet cannot read bn_eps=0\.3 of eps\.cfg"):
        save_darknet_weights(source, tmp_path / "a.weights")


@pytest.mark.parametrize("key", ["anchors", "scale_x_y", "new_coords"])
def test_heads_of_a_checkpoint_that_stand_for_other_boxes_are_refused(key: str, tmp_path: Path) -> None:
    source, path = randomise(tiny(3)), tmp_path / "a.pt"
    cfg = source.cfg
    changed = {
        "anchors": models.with_anchors(cfg, [(width + 1, height) for width, height in source.heads[0].all_anchors]),
        "scale_x_y": parse_cfg(cfg.text.replace("[yolo]", "[yolo]\nscale_x_y=2"), "changed.cfg"),
        "new_coords": parse_cfg(cfg.text.replace("[yolo]", "[yolo]\nnew_coords=1"), "changed.cfg"),
    }[key]
    for ours, theirs in ((cfg, changed), (changed, cfg)):
        model, network = Darknet(ours, 3, width=0.1), described(source) | {"cfg": theirs.text}
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ModelError, match=rf"a\.pt were trained with other {key}"):
            load_weights_of_checkpoint(model, source.state_dict(), path, network)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        load_weights_of_checkpoint(model, source.state_dict(), path, network | {"cfg": ours.text})


SCHEMES = {
    "module_list.N.Conv2d": PlainNetwork("module_list", ("Conv2d", "BatchNorm2d"), 1e-4),
    "models.N.conv1": PlainNetwork("models", ("conv{n}", "bn{n}"), 1e-5),
    "batch norm registered first": PlainNetwork("layers", ("convolution", "bn"), 1e-3, norm_first=True),
    "as this project": PlainNetwork("layers", ("convolution", "norm"), 1e-6),
}


def load(model: Darknet, path: Path, content: Any) -> str:
    torch.save(content, path)
    return str(models.load_foreign_state_dict(model, read_tensor_file(path), path))


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"ema": {**state, "a": torch.ones(3)}, "best_fitness": None, "model": state, "optimizer": None},
        lambda state: {f"module.{name}": tensor for name, tensor in state.items()},
        lambda state: {**state, "module_list.6.anchor_grid": torch.rand(1, 2), "module_list.6.anchors": torch.ones(4)},
        lambda state: {name: tensor.double() for name, tensor in state.items()},
    ],
    ids=["plain", "model", "module.", "anchors", "float64"],
)
def test_both_networks_compute_the_same_afterwards(wrap: Any, scheme: str, tmp_path: Path) -> None:
    model, plain, images = small(), SCHEMES[scheme], torch.rand(2, 3, 32, 32)
    content = wrap(plain.state_dict())
    said = load(model, tmp_path / "theirs.pt", content)
    assert "7 of 7 convolutions" in said and ("under ema" in said) == ("ema" in content)
    with torch.no_grad():
        for ours, theirs in zip(model(images), plain(images), strict=True):
            torch.testing.assert_close(ours.squeeze(1).permute(0, 3, 1, 2), theirs, rtol=1e-5, atol=1e-5)


def without(name: str) -> Any:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def instead(name: str, tensor: Tensor) -> Any:
    return lambda state: {**state, name: tensor}


KERNELS, SHAPE = "module_list.3.Conv2d.weight", (16, 8, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("module_list.0.Conv2d.weight"), r"list\.1\.Conv2d.* of .* in the place of layers\.0\.conv\.weight"),
        (without("module_list.11.Conv2d.bias"), r"nothing of shape .* in the place of layers\.11\.conv\.bias"),
        (instead("extra.weight", torch.ones(1, 1, 1, 1)), r"extra\.weight of .*in the place of nothing"),
        (without("module_list.3.BatchNorm2d.running_var"), r"running_var of shape .* in the place of"),
        (instead(KERNELS, torch.full(SHAPE, float("nan"))), r"module_list\.3\.Conv2d\.weight has values .* not finite"),
        (instead(KERNELS, torch.full(SHAPE, 1e300, dtype=torch.float64)), r"not finite"),
        (instead(KERNELS, torch.ones(SHAPE).to_sparse()), r"not finite or not plain"),
        (lambda state: {**state, 7: torch.ones(1)}, "holds no state dict"),
        (lambda state: {"weights": state}, "holds no state dict, neither at the top level nor under model"),
    ],
)
def test_what_does_not_fit_is_refused_and_changes_nothing(change: Any, message: str, tmp_path: Path) -> None:
    model, state = small(), SCHEMES["module_list.N.Conv2d"].state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message) as refused:
        load(model, tmp_path / "theirs.pt", change(state))
    assert "\n" not in str(refused.value) and str(tmp_path / "theirs.pt") in str(refused.value)
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "whole_module.pt"
    torch.save({"model": SCHEMES["models.N.conv1"]}, path)  # a whole module
    with pytest.raises(ModelError, match=r"pickled objects \(\S*PlainNetwork\).*torch\.save\(model\.state_dict\(\)"):
        read_tensor_file(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"is damaged, or torch\.save did not write it"):
        read_tensor_file(path)
    for missing in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(ModelError, match=r"is not a file"):
            read_tensor_file(missing)


@pytest.mark.parametrize("kind", [".weights", "zip", "old torch"])
def test_damaged_files_load_or_are_refused_in_one_sentence_and_change_nothing(kind: str, tmp_path: Path) -> None:
    path, rng, refusals, kinds = tmp_path / "file", random.Random(0), 0, [*DAMAGES.values()]
    if kind == ".weights":
        save_darknet_weights(small(), path)
    else:
        torch.save(SCHEMES["models.N.conv1"].state_dict(), path, _use_new_zipfile_serialization=kind == "zip")
    good, model = path.read_bytes(), small()
    for case in range(100):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        path.unlink()  # a file that is mapped must not shrink
        path.write_bytes(good if case == 0 else kinds[case % len(kinds)](good, rng))
        try:
            if kind == ".weights":
                load_darknet_weights(model, path)
            else:
                models.load_foreign_state_dict(model, read_tensor_file(path), path)
            assert all(tensor.isfinite().all() for tensor in model.state_dict().values()), case
        except ModelError as error:
            refusals += 1
            assert case and re.fullmatch(rf"{path}.* fix: .*", str(error)) and len(str(error)) < 500, case
            assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items()), case
    assert 50 < refusals < 100
