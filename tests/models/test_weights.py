"""Darknet .weights files: order of the values, backbones, other class counts, and damaged files."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from models import (
    Darknet,
    ModelError,
    load_darknet_weights,
    load_weights_of_checkpoint,
    parse_cfg,
    save_darknet_weights,
    with_anchors,
    with_scale_x_y,
    zoo_cfg,
)
from models.weights import weight_tensors


def described(model: Darknet) -> dict[str, Any]:
    """A network of width 0.1 as a checkpoint describes it."""
    return {"cfg": model.cfg.text, "source": model.cfg.source, "num_classes": model.num_classes, "width": 0.1}


def tiny(num_classes: int = 3, width: float = 0.1) -> Darknet:
    return Darknet(zoo_cfg("yolov3-tiny"), num_classes=num_classes, width=width)


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


def randomise(model: Darknet) -> Darknet:
    for tensor in values_of(model):
        tensor.uniform_(0.1, 1)
    return model


def write(path: Path, tensors: list[Tensor], version: tuple[int, int, int] = (0, 2, 5), seen: int = 2**40) -> Path:
    wide = version[0] * 10 + version[1] >= 2
    header = np.array(version, "<i4").tobytes() + np.array([seen], "<u8" if wide else "<u4").tobytes()
    path.write_bytes(header + b"".join(tensor.numpy().astype("<f4").tobytes() for tensor in tensors))
    return path


def all_equal(one: Darknet, other: Darknet) -> bool:
    return all(a.equal(b) for a, b in zip(values_of(one), values_of(other), strict=True))


def test_every_value_has_its_place(tmp_path: Path) -> None:
    text = """[net]
    channels=2
    [convolutional]
    batch_normalize=1
    filters=4
    groups=2
    size=3
    pad=1
    activation=mish
    [convolutional]
    filters=6
    activation=linear
    [yolo]
    anchors=4,6
    classes=1
    """
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


def test_backbone_file_leaves_the_rest_alone(tmp_path: Path) -> None:
    source, model, untouched = randomise(tiny()), tiny(), tiny()
    untouched.load_state_dict(model.state_dict())
    report = load_darknet_weights(model, write(tmp_path / "a.conv.7", values_of(source)[: 7 * 5]))
    assert (report.layers_loaded, report.num_classes) == (7, None)
    assert all(a.equal(b) for a, b in zip(values_of(model)[:35], values_of(source), strict=False))
    assert all(a.equal(b) for a, b in zip(values_of(model)[35:], values_of(untouched)[35:], strict=True))


@pytest.mark.parametrize(("stored", "ours"), [(80, 3), (1, 3)])
def test_other_heads_keep_everything_else(stored: int, ours: int, tmp_path: Path) -> None:
    source, model, untouched = randomise(tiny(stored)), tiny(ours), tiny(ours)
    untouched.load_state_dict(model.state_dict())
    report = load_darknet_weights(model, write(tmp_path / "a.weights", values_of(source)))
    assert (report.layers_loaded, report.num_classes) == (11, stored)
    num_heads = "1 class" if stored == 1 else f"{stored} classes"
    assert str(report).startswith("initial weights: 11 of 13 layers with weights (")
    assert f"its heads for {num_heads} were left out and those for {ours} classes start fresh" in str(report)
    kept = sum(tensor.numel() for layer, _, tensor in weight_tensors(model) if layer not in (15, 22))
    assert report.values_loaded == kept and not report.is_whole
    heads = {head.layer - 1 for head in model.heads}
    theirs, before = (dict((name, tensor) for _, name, tensor in weight_tensors(m)) for m in (source, untouched))
    for layer, name, tensor in weight_tensors(model):
        assert tensor.equal(before[name] if layer in heads else theirs[name]), name


def test_files_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path) -> None:
    source, model = randomise(tiny()), tiny()
    before, good = tiny(), write(tmp_path / "good.weights", values_of(source)).read_bytes()
    before.load_state_dict(model.state_dict())
    infinite = bytearray(good)
    infinite[-4:] = np.float32("inf").tobytes()
    cases = {
        "short by one value": (
            good[:-4],
            r"holds [\d,]+ values, this network with 3 classes and width 0\.1 needs [\d,]+",
        ),
        "long by one value": (good + b"\0\0\0\0", r"holds [\d,]+ values, this network"),
        "cut within a value": (good[:-3], r"holds 86,247 values and 1/4 of another, .* needs 86,248\. fix:"),
        "header only": (good[:20], "holds 0 values"),
        "empty": (b"", "has 0 bytes"),
        "not finite": (bytes(infinite), r"damaged: values for layers\.22\.conv\.weight are not finite"),
        "another format": (b"\x89PNG" + good[4:], "no Darknet .weights file"),
        "a checkpoint": (b"PK\x03\x04" + good[4:], r"no Darknet .weights file.* end in \.pt"),
        "a web page": (b"<!DOCTYPE html>\n<html>", "no Darknet .weights file: it begins with b'<!DOCTYPE"),
    }
    for name, (content, message) in cases.items():
        path = tmp_path / f"{name}.weights"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=message):
            load_darknet_weights(model, path)
    with pytest.raises(ModelError, match=r"cannot read the weights .*none\.weights"):
        load_darknet_weights(model, tmp_path / "none.weights")
    assert all_equal(before, model) and model.seen == 0


def test_other_width_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights", values_of(tiny(width=0.25)))
    with pytest.raises(ModelError, match=r"fix: set model\.cfg and model\.width"):
        load_darknet_weights(tiny(width=0.5), path)


@pytest.mark.parametrize(
    ("version", "seen"), [((0, 1, 0), 2**32 - 1), ((0, 2, 0), 2**63), ((0, 2, 5), 7), ((1, 0, 3), 0)]
)
def test_loading_and_saving_gives_the_same_bytes(version: tuple[int, int, int], seen: int, tmp_path: Path) -> None:
    path = write(tmp_path / "a.weights", values_of(randomise(tiny())), version, seen)
    model = tiny().to(memory_format=torch.channels_last)
    load_darknet_weights(model, path)
    count = save_darknet_weights(model, tmp_path / "new" / "b.weights")
    assert 4 * count == path.stat().st_size - (16 if version == (0, 1, 0) else 20)
    assert (tmp_path / "new" / "b.weights").read_bytes() == path.read_bytes()
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["b.weights"]


def test_a_file_cut_behind_any_layer_is_a_beginning_of_the_whole_and_loads(tmp_path: Path) -> None:
    source = randomise(tiny())
    source.seen = 12345
    save_darknet_weights(source, tmp_path / "whole.weights")
    whole = (tmp_path / "whole.weights").read_bytes()
    theirs = dict((name, tensor) for _, name, tensor in weight_tensors(source))
    for end in range(1, len(source.layers) + 1):
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
    assert "13 of 13" not in str(report) and "all" in str(report)


def test_a_count_that_means_two_things_is_refused(tmp_path: Path) -> None:
    """The first of two heads has as many values as both would have for 8 classes."""
    head = "[convolutional]\nfilters=26\nactivation=linear\n[yolo]\nanchors=1,1\nclasses=21\n"
    text = f"[net]\n[convolutional]\nfilters=8\nactivation=linear\n{head}[route]\nlayers=0\n{head}"
    model, path = Darknet(parse_cfg(text, "two.cfg")), tmp_path / "two.conv.3"
    count = save_darknet_weights(model, path, up_to_layer=3)
    assert count == sum(tensor.numel() for _, _, tensor in weight_tensors(Darknet(model.cfg, num_classes=8)))
    with pytest.raises(ModelError, match="fits a whole file for 8 classes as well as one for 21 cut after layer 1"):
        load_darknet_weights(model, path)
    load_darknet_weights(Darknet(model.cfg, num_classes=8), path)


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = tmp_path / "a.weights", tiny()
    save_darknet_weights(model, path)
    old = path.read_bytes()

    def no_space(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("models.weights.os.fsync", no_space)
    with pytest.raises(ModelError, match=r"cannot write .*a\.weights \(No space left on device\)\. fix:"):
        save_darknet_weights(randomise(model), path)
    monkeypatch.undo()
    model.layers[2].conv.weight.data[0, 0, 0, 0] = float("nan")
    with pytest.raises(ModelError, match=r"layers\.2\.conv\.weight has values that are not finite"):
        save_darknet_weights(model, path)
    for end in (0, 25, -1):
        with pytest.raises(ModelError, match=rf"up_to_layer must be between 1 and this network's 24 layers, got {end}"):
            save_darknet_weights(tiny(), path, up_to_layer=end)
    model = tiny()
    model.seen, model.weights_version = 2**32, (0, 1, 0)
    with pytest.raises(ModelError, match=r"seen=4,294,967,296 does not fit the 32 bits of a header of version 0\.1"):
        save_darknet_weights(model, path)
    assert path.read_bytes() == old and [file.name for file in tmp_path.iterdir()] == ["a.weights"]


def test_state_dict_of_a_checkpoint_with_and_without_heads(tmp_path: Path) -> None:
    source, same, other = randomise(tiny(3)), tiny(3), tiny(5)
    path, network = tmp_path / "a.pt", described(source)
    load_weights_of_checkpoint(same, source.state_dict(), path, network)
    assert all_equal(source, same)
    odd = source.state_dict() | {"layers.15.conv.bias": torch.zeros(7)}  # another number of anchors
    assert load_weights_of_checkpoint(tiny(3), odd, path, network).heads_left_out
    load_weights_of_checkpoint(other, source.state_dict(), path, network)
    assert other.layers[13].conv.weight.equal(source.layers[13].conv.weight)
    with pytest.raises(ModelError, match=r"layers\.2\..* fix: use the model="):
        load_weights_of_checkpoint(tiny(3, width=0.5), source.state_dict(), path, network)


@pytest.mark.parametrize("key", ["anchors", "scale_x_y", "new_coords"])
def test_heads_of_a_checkpoint_that_stand_for_other_boxes_are_refused(key: str, tmp_path: Path) -> None:
    source, path = randomise(tiny(3)), tmp_path / "a.pt"
    cfg = source.cfg
    changed = {
        "anchors": with_anchors(cfg, [(width + 1, height) for width, height in source.heads[0].all_anchors]),
        "scale_x_y": with_scale_x_y(cfg, 2),
        "new_coords": parse_cfg(cfg.text.replace("[yolo]", "[yolo]\nnew_coords=1"), "changed.cfg"),
    }[key]
    for ours, theirs in ((cfg, changed), (changed, cfg)):
        model, network = Darknet(ours, 3, width=0.1), described(source) | {"cfg": theirs.text}
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with pytest.raises(ModelError, match=rf"a\.pt were trained with other {key}"):
            load_weights_of_checkpoint(model, source.state_dict(), path, network)
        assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
        load_weights_of_checkpoint(model, source.state_dict(), path, network | {"cfg": ours.text})
