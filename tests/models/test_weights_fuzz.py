"""Damaged files of weights: each loads, or is refused in one sentence and changes nothing."""

from __future__ import annotations

import hashlib
import io
import random
import resource
import struct
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conf.network import load_initial_weights
from models import Darknet, ModelError, save_darknet_weights
from tests.models.small_network import PlainNetwork, small
from train_utils.checkpoint import save_checkpoint
from train_utils.errors import CheckpointError

Mutation = Callable[[bytes, random.Random], bytes]
NOT_FINITE = [b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\x00\x00\x80\xff", b"\xff\xff\xff\xff"]


def cut(good: bytes, rng: random.Random) -> bytes:
    return good[: rng.choice([rng.randrange(25), rng.randrange(len(good))])]


def extended(good: bytes, rng: random.Random) -> bytes:
    return good + rng.randbytes(rng.choice([1, 2, 3, 4, 5, 64, 4 * rng.randrange(1, 5000)]))


def other_header(good: bytes, rng: random.Random) -> bytes:
    numbers = [rng.choice([-(2**31), -1, 0, 1, 2, 5, 999, 1000, 2**31 - 1]) for _ in range(3)]
    return struct.pack("<3i", *numbers) + rng.randbytes(8) + good[20:]


def not_finite(good: bytes, rng: random.Random) -> bytes:
    place = 20 + 4 * rng.randrange((len(good) - 20) // 4)
    return good[:place] + rng.choice(NOT_FINITE) + good[place + 4 :]


def bytes_changed(good: bytes, rng: random.Random) -> bytes:
    changed = bytearray(good)
    for _ in range(rng.randrange(1, 50)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


def something_else(good: bytes, rng: random.Random) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("yolov3.weights", good)
    saved = io.BytesIO()
    torch.save({"a": torch.ones(3)}, saved)
    text = "<!DOCTYPE html>\n<html><head><title>Not found</title></head></html>\n"
    return rng.choice([b"", b"\n", text.encode(), packed.getvalue(), saved.getvalue(), rng.randbytes(len(good))])


TORCH: list[Mutation] = [cut, extended, bytes_changed, something_else]
DARKNET = [*TORCH, other_header, not_finite]


def state_of(model: Darknet) -> tuple[str, int, tuple[int, int, int]]:
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest(), model.seen, model.weights_version


def try_all(good: bytes, path: Path, mutations: list[Mutation], rounds: int) -> Counter[str]:
    """Run every mutation `rounds` times; count the loaded files and the refused ones by error."""
    outcomes: Counter[str] = Counter()
    model = small()
    before = state_of(model)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number, mutate in enumerate(mutations):
        for seed in range(rounds):
            path.unlink(missing_ok=True)  # a file that is mapped must not shrink
            path.write_bytes(mutate(good, random.Random(1000 * number + seed)))
            what = f"{mutate.__name__} with seed {1000 * number + seed}"
            try:
                report = load_initial_weights(model, path)
            except (ModelError, CheckpointError) as refused:
                assert "\n" not in str(refused) and str(path) in str(refused) and "fix: " in str(refused), what
                assert len(str(refused)) < 500, what
                assert state_of(model) == before, what
                outcomes[f"{mutate.__name__} refused"] += 1
            else:
                assert str(report).startswith("initial weights: ")
                assert all(tensor.isfinite().all() for tensor in model.state_dict().values()), what
                before = state_of(model)
                outcomes[f"{mutate.__name__} loaded"] += 1
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024, "more than 200 MiB"
    return outcomes


def test_damaged_darknet_weights(tmp_path: Path) -> None:
    save_darknet_weights(small(), tmp_path / "good.weights")
    good = (tmp_path / "good.weights").read_bytes()
    outcomes = try_all(good, tmp_path / "damaged.weights", DARKNET, rounds=20)
    assert outcomes["extended refused"] == outcomes["something_else refused"] == 20, outcomes
    assert outcomes["not_finite refused"] >= 12, "all but those planted in heads that are left out"
    assert outcomes["other_header loaded"] >= 1, "seen may be any number"
    with pytest.raises(CheckpointError, match=r"has no checkpoints/best\.pt\. fix:"):
        load_initial_weights(small(), tmp_path)
    (tmp_path / "huge.weights").write_bytes(good)
    with (tmp_path / "huge.weights").open("r+b") as file:
        file.truncate(2**40)  # one TiB that takes no room
    with pytest.raises(ModelError, match=r"holds 274,877,906,939 values, this network .* needs"):
        load_initial_weights(small(), tmp_path / "huge.weights")


@pytest.mark.parametrize("kind", ["state dict", "state dict of old torch", "checkpoint"])
def test_damaged_files_of_torch(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "good.pt"
    if kind == "checkpoint":
        model = small()
        network = {"cfg": model.cfg.text, "source": "small.cfg", "num_classes": 2, "width": 1.0}
        state = {"network": network, "ema": model.state_dict(), "config": {}, "names": ["a", "b"], "seen": 3}
        save_checkpoint(path, state)
    else:
        plain = PlainNetwork("module_list", ("Conv2d", "BatchNorm2d"))
        torch.save(plain.state_dict(), path, _use_new_zipfile_serialization=kind == "state dict")
    load_initial_weights(small(), path)
    outcomes = try_all(path.read_bytes(), tmp_path / "damaged.pt", TORCH, rounds=12)
    assert outcomes["cut refused"] >= 11 and outcomes["something_else refused"] == 12, outcomes
    if kind == "checkpoint":
        assert outcomes["bytes_changed refused"] >= 10, "its digest shows every change of a value"
