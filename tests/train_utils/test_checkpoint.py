"""Checkpoints: they restore every bit, and damaged or foreign files are reported."""

import copy
import enum
import os
import resource
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from conf import CheckpointError
from train_utils import checkpoint
from train_utils.checkpoint import CheckpointWriter, load_checkpoint, load_last, save_checkpoint


class Color(enum.StrEnum):
    red = "red"


def sample_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "half": torch.tensor([1.5, -0.0], dtype=torch.bfloat16),
        "parameter": nn.Parameter(torch.ones(2)),
        "no rows": torch.zeros(0, 4),
        "rng": torch.get_rng_state(),
        "numbers": [1, 2.5, float("inf"), -0.0, 2**70, True, None, ("a", "\u00e9")],
    }


def assert_same(read: Any, written: Any) -> None:
    if isinstance(written, torch.Tensor):
        assert (read.dtype, read.shape, read.device.type) == (written.dtype, written.shape, "cpu")
        bits = [tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (read, written)]
        assert torch.equal(*bits)
    elif isinstance(written, dict):
        assert type(read) is dict
        assert list(read) == list(written)
        for key in written:
            assert_same(read[key], written[key])
    elif isinstance(written, (list, tuple)):
        assert (type(read), len(read)) == (type(written), len(written))
        for pair in zip(read, written, strict=True):
            assert_same(*pair)
    else:
        assert (type(read), repr(read)) == (type(written), repr(written))


def test_round_trip(tmp_path: Path) -> None:
    state = sample_state()
    save_checkpoint(tmp_path / "a.pt", state)
    assert_same(load_checkpoint(tmp_path / "a.pt"), state)
    assert os.listdir(tmp_path) == ["a.pt"]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    model.load_state_dict(load_checkpoint(tmp_path / "a.pt")["model"])


def test_the_digest_tells_names_types_and_shapes() -> None:
    values = [torch.zeros(2, 3), torch.zeros(3, 2), torch.zeros(2, 3).int(), 0, 0.0, False, "0", None, [], (), {}, [0]]
    digests = {checkpoint.digest_of({name: value}) for name in ("a", "b") for value in values}
    assert len(digests) == 2 * len(values)


def test_a_network_needs_a_name_for_each_class() -> None:
    shape = {"cfg": "", "source": "", "num_classes": 2, "width": 1.0}
    numbers = {"weights_version": [0, 2, 5], "epoch": 1, "step": 1, "seen": 1}
    state = {"config": {}, "network": shape, "names": ["a", "b"], "category_ids": [1, 2], "ema": {}, **numbers}
    assert checkpoint.check_entries(state, "x") is state
    for wrong in ({"names": ["a"]}, {"category_ids": [1]}, {"network": shape | {"num_classes": 3}}):
        with pytest.raises(CheckpointError, match=r"^x is damaged \(.* differ in number\)\. fix: "):
            checkpoint.check_entries(state | wrong, "x")


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", {"view": torch.zeros(1_000_000)[:10]})
    assert (tmp_path / "a.pt").stat().st_size < 10_000


@pytest.mark.parametrize("value", [np.float64(1), Color.red])
def test_what_is_not_plain_data_is_named(value: object, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"state\.a\.b\.1 of a checkpoint is a (float64|Color).*fix: "):
        save_checkpoint(tmp_path / "a.pt", {"a": {"b": [1, value]}})
    assert os.listdir(tmp_path) == []


def test_a_run_folder_stands_for_its_best_or_last(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"there is no checkpoint {tmp_path}/x\.pt\. fix: "):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"there is no checkpoint in .*\. fix: "):
        load_last(tmp_path)
    for name in ("best", "last"):
        save_checkpoint(tmp_path / "checkpoints" / f"{name}.pt", {"name": name})
    assert load_checkpoint(tmp_path)["name"] == "best"
    assert load_checkpoint(tmp_path, which="last")["name"] == "last"
    (tmp_path / "checkpoints" / "best.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"the folder {tmp_path} has no checkpoints/best\.pt\. fix: "):
        load_checkpoint(tmp_path)


def test_a_cut_or_a_flipped_bit_is_refused_or_without_effect(tmp_path: Path) -> None:
    path, state = tmp_path / "a.pt", sample_state()
    save_checkpoint(path, state)
    content = path.read_bytes()
    refused = 0
    for length in (0, 1, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"a\.pt is damaged.*fix: "):
            load_checkpoint(path)
    for offset in range(0, len(content), max(1, len(content) // 400)):
        damaged = bytearray(content)
        damaged[offset] ^= 1 << offset % 8
        path.write_bytes(damaged)
        try:
            read = load_checkpoint(path)
        except CheckpointError:
            refused += 1
        else:
            assert_same(read, state)  # the bit was padding
    assert refused > 100
    weights = sample_state()["model"]["0.weight"].contiguous().numpy().tobytes()
    damaged = bytearray(content)
    damaged[content.index(weights)] ^= 1
    path.write_bytes(damaged)
    assert torch.load(path, weights_only=True)["format"], "torch itself does not see it"
    with pytest.raises(CheckpointError, match="does not match its digest"):
        load_checkpoint(path)


class Malicious:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.canary),)


def test_foreign_files_are_refused_and_run_nothing(tmp_path: Path) -> None:
    path, canary = tmp_path / "a.pt", tmp_path / "canary"
    torch.save({"model": nn.Linear(1, 1).state_dict(), "epoch": 3}, path)
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this project .*\. fix: .*model\.weights"):
        load_checkpoint(path)
    torch.save({"format": "hydra-yolov3-spp checkpoint", "version": 99, "state": {}}, path)
    with pytest.raises(CheckpointError, match="not a checkpoint of this project and version"):
        load_checkpoint(path)
    torch.save({"state": Malicious(canary)}, path)
    with pytest.raises(CheckpointError, match=r"holds pickled objects \(posix\.mkdir\), .*\. fix: ") as refused:
        load_checkpoint(path)
    assert "weights_only" not in str(refused.value), "torch's advice to run the file's code"
    assert not canary.exists()


NAMES = ("last", "last.previous", "best")


@pytest.mark.parametrize(
    ("there", "damaged", "read"),
    [
        (NAMES, (), "last"), (NAMES, ("last",), "last.previous"), (NAMES, ("last", "last.previous"), "best"),
        (NAMES, NAMES, None), (("last.previous", "best"), (), "last.previous"), (("best",), (), "best"),
    ],
)  # fmt: skip
def test_the_first_file_that_can_be_read_counts(there, damaged, read, tmp_path) -> None:
    for name in there:
        path = tmp_path / "checkpoints" / f"{name}.pt"
        save_checkpoint(path, {"name": name})
        if name in damaged:
            path.write_bytes(path.read_bytes()[:500])
    if read is None:
        with pytest.raises(CheckpointError) as caught:
            load_last(tmp_path)
        message: str | None = str(caught.value)
    else:
        state, message = load_last(tmp_path)
        assert state["name"] == read and (message is None) == (read == "last")
    assert all(f"{name}.pt is damaged" in (message or "") for name in damaged)


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.with_name("a.pt.tmp").write_bytes(b"half a checkpoint")  # which a kill left
    save_checkpoint(path, {"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # fails in mid-write, as a full disk does
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write {path}: .*fix: "):
            save_checkpoint(path, {"big": torch.zeros(100_000)}, keep_previous=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_checkpoint(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


@pytest.mark.parametrize("call", range(1, 5))
def test_content_is_on_the_disk_before_it_has_its_name(call, tmp_path, monkeypatch) -> None:
    save_checkpoint(tmp_path / "checkpoints" / "last.pt", {"step": 1})
    calls: list[str] = []

    def spied(name: str, function: Callable[..., object], *arguments: object) -> object:
        calls.append(name if name == "fsync" else Path(str(arguments[1])).name)
        if len(calls) == call:
            raise OSError(28, "No space left on device")
        return function(*arguments)

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace"):
            patch.setattr(os, name, partial(spied, name, getattr(os, name)))
        with pytest.raises(CheckpointError, match=r"cannot write .*No space left on device\. fix: "):
            save_checkpoint(tmp_path / "checkpoints" / "last.pt", {"step": 2}, keep_previous=True)
    assert calls == ["fsync", "last.previous.pt", "last.pt", "fsync"][:call]
    assert load_last(tmp_path)[0]["step"] == (2 if call == 4 else 1)


def test_checkpoints_are_due_by_steps_and_minutes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, options = [0.0], SimpleNamespace(save_every_steps=3, save_every_minutes=2)
    monkeypatch.setattr(checkpoint, "time", SimpleNamespace(monotonic=lambda: now[0]))
    writer = CheckpointWriter(tmp_path, print, options)
    assert [step for step in range(1, 8) if writer.is_due(step)] == [3, 6]
    for now[0], is_due in ((119.0, False), (120.0, True), (130.0, True)):
        assert writer.is_due(1) == is_due
    writer.save(None)  # as on all ranks but the first
    assert not writer.is_due(1)


def test_a_checkpoint_in_the_background_does_not_change_with_the_weights(tmp_path, monkeypatch) -> None:
    may_write, write = Event(), checkpoint.save_checkpoint

    def waits(*arguments: Any, **options: Any) -> None:
        assert may_write.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(checkpoint, "save_checkpoint", waits)
    writer, state = CheckpointWriter(tmp_path, print), sample_state()
    before = copy.deepcopy(state)
    writer.save(state, is_best=True)
    with torch.no_grad():
        for tensor in [*state["model"].values(), state["rng"], state["parameter"], state["half"]]:
            tensor.add_(1)
        state["optimizer"]["state"][0]["momentum_buffer"].add_(1)
        state["numbers"].append(2)
    may_write.set()
    writer.close()
    for which in ("best", "last"):
        assert_same(load_checkpoint(tmp_path, which), before)
    writer = CheckpointWriter(tmp_path, print)
    writer.save({"step": 2})
    writer.close()
    assert_same(load_checkpoint(tmp_path, "last.previous"), before)


def test_writes_that_fail_are_logged_and_the_last_one_ends_the_run(tmp_path, monkeypatch) -> None:
    said: list[str] = []
    writer, full = CheckpointWriter(tmp_path, said.append), [True]

    def save(path: Path, *_: object, **options: object) -> None:
        if full[0]:
            raise CheckpointError(f"cannot write {path}")

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    for full[0] in (True, True, False, True, True):
        writer.save({"step": 1}, is_best=True)
        assert (writer.pending.exception() is not None) == full[0]
    assert len(said) == 3 and all(f"cannot write {tmp_path}/checkpoints/best.pt" in line for line in said)
    with pytest.raises(CheckpointError, match="cannot write"):
        writer.close()
    assert len(said) == 3, "the error says it"


def test_a_best_checkpoint_that_could_not_be_written_comes_with_the_next_one(tmp_path: Path) -> None:
    writer, blocked = CheckpointWriter(tmp_path, print), tmp_path / "checkpoints"
    blocked.touch()
    writer.save({"epoch": 1}, is_best=True)
    assert writer.pending.exception() is not None
    blocked.unlink()
    writer.save({"epoch": 2})
    writer.close()
    assert [load_checkpoint(tmp_path, which)["epoch"] for which in ("best", "last")] == [1, 2]
