"""State dicts of other systems: every value in its place, and nothing loaded if one misfits."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from models import Darknet, ModelError, load_foreign_state_dict, read_tensor_file
from tests.models.small_network import PlainNetwork, small

SCHEMES = {
    "module_list.N.Conv2d": PlainNetwork("module_list", ("Conv2d", "BatchNorm2d")),
    "models.N.conv1": PlainNetwork("models", ("conv{n}", "bn{n}")),
    "batch norm registered first": PlainNetwork("layers", ("convolution", "norm"), norm_first=True),
}


class Unknown:
    """A class whose pickle runs code."""


def load(model: Darknet, path: Path, content: Any) -> str:
    torch.save(content, path)
    return str(load_foreign_state_dict(model, read_tensor_file(path), path))


def assert_same_maps(model: Darknet, plain: PlainNetwork) -> None:
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        for ours, theirs in zip(model(images), plain(images), strict=True):
            torch.testing.assert_close(ours.squeeze(1).permute(0, 3, 1, 2), theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_both_networks_compute_the_same_afterwards(scheme: str, tmp_path: Path) -> None:
    model, plain = small(), SCHEMES[scheme]
    message = load(model, tmp_path / "theirs.pt", plain.state_dict())
    assert_same_maps(model, plain)
    assert "all" in message and "2 classes" in message


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: {"epoch": 3, "best_fitness": None, "model": state, "optimizer": None},
        lambda state: {"state_dict": state, "hyper_parameters": {"lr": 0.1}},
        lambda state: OrderedDict((f"module.{name}", tensor) for name, tensor in state.items()),
        lambda state: {**state, "module_list.6.anchor_grid": torch.rand(1, 2), "module_list.6.anchors": torch.ones(4)},
        lambda state: {name: tensor.double() for name, tensor in state.items()},
    ],
    ids=["model", "state_dict", "module.", "anchors", "float64"],
)
def test_usual_wrappings_are_opened(wrap: Any, tmp_path: Path) -> None:
    model, plain = small(), SCHEMES["module_list.N.Conv2d"]
    load(model, tmp_path / "theirs.pth", wrap(plain.state_dict()))
    assert_same_maps(model, plain)


def test_files_of_old_torch_versions_are_read(tmp_path: Path) -> None:
    model, plain = small(), SCHEMES["models.N.conv1"]
    torch.save(plain.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    load_foreign_state_dict(model, read_tensor_file(tmp_path / "old.pt"), tmp_path / "old.pt")
    assert_same_maps(model, plain)


def test_other_heads_keep_everything_else(tmp_path: Path) -> None:
    plain, model = PlainNetwork("module_list", ("Conv2d", "BatchNorm2d"), num_classes=4), small(2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = load(model, tmp_path / "four.pt", plain.state_dict())
    assert "5 of 7 layers with weights" in message
    assert "its heads for 4 classes were left out and those for 2 classes start fresh" in message
    for name, tensor in model.state_dict().items():
        same = tensor.equal(before[name])
        assert same if name.startswith(("layers.5.", "layers.11.")) or name.endswith("tracked") else not same, name


def without(name: str) -> Any:
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


def instead(name: str, tensor: Tensor) -> Any:
    return lambda state: {**state, name: tensor}


KERNELS, SHAPE = "module_list.3.Conv2d.weight", (16, 8, 3, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            without("module_list.0.Conv2d.weight"),
            r"convolution 1 is module_list\.1\.Conv2d with .* fix: set model\.cfg",
        ),
        (without("module_list.8.Conv2d.weight"), r"convolution 6 is module_list\.11\..*here it is layers\.8\.conv"),
        (without("module_list.11.Conv2d.bias"), r"convolution 7 is module_list\.11\.Conv2d with {'weight"),
        (instead("extra.weight", torch.ones(1, 1, 1, 1)), r"convolution 8 is extra with .*here it is none"),
        (instead("fc.weight", torch.ones(4, 4)), r"fc with .*, which is neither a convolution nor a batch"),
        (without("module_list.3.BatchNorm2d.running_var"), r"module_list\.3\.BatchNorm2d with {'bias.* neither"),
        (instead(KERNELS, torch.full(SHAPE, float("nan"))), r"module_list\.3\.Conv2d\.weight has values .* not finite"),
        (instead(KERNELS, torch.full(SHAPE, 1e300, dtype=torch.float64)), r"not finite"),
        (instead(KERNELS, torch.ones(SHAPE).to_sparse()), r"not a plain tensor"),
        (lambda state: {}, "holds no state dict"),
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
    torch.save({"model": Unknown()}, path)
    with pytest.raises(ModelError, match=r"holds pickled objects \(\S*Unknown\).*torch\.save\(model\.state_dict\(\)"):
        read_tensor_file(path)
    torch.save(SCHEMES["models.N.conv1"], path)  # a whole module
    with pytest.raises(ModelError, match=r"holds pickled objects \(\S*PlainNetwork\)"):
        read_tensor_file(path)
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ModelError, match=r"is damaged, or torch\.save did not write it"):
        read_tensor_file(path)
    for missing in (tmp_path / "none.pt", tmp_path):
        with pytest.raises(ModelError, match=r"is no file"):
            read_tensor_file(missing)
