"""Checkpoints: they restore every bit, and damaged or foreign files are reported."""

from __future__ import annotations

import enum
import os
import pickle
import resource
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from train_utils import checkpoint
from train_utils.checkpoint import CheckpointWriter, load_checkpoint, load_last, save_checkpoint
from train_utils.errors import CheckpointError


class Color(enum.StrEnum):
    red = "red"


def sample_state() -> dict[str, Any]:
    """A value of every kind that a training holds."""
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


def test_a_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", {"view": torch.zeros(1_000_000)[:10]})
    assert (tmp_path / "a.pt").stat().st_size < 10_000


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (np.float64(1), r"state\.a\.b\[1\] of a checkpoint is a float64"),
        (np.zeros(2), r"state\.a\.b\[1\] of a checkpoint is a ndarray"),
        (Color.red, r"state\.a\.b\[1\] of a checkpoint is a Color"),
        (Path("x"), r"state\.a\.b\[1\] of a checkpoint is a PosixPath"),
        ({None: 1}, r"state\.a\.b\[1\] has a key of type NoneType"),
    ],
)
def test_what_is_not_plain_data_is_named(value: object, named: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"{named}.*fix: "):
        save_checkpoint(tmp_path / "a.pt", {"a": {"b": [1, value]}})
    assert os.listdir(tmp_path) == []


def test_an_ordered_dict_is_read_back_as_a_dict(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "a.pt", {"a": OrderedDict(x=1)})
    assert type(load_checkpoint(tmp_path / "a.pt")["a"]) is dict


def test_a_run_folder_stands_for_its_best_or_last(tmp_path: Path) -> None:
    for name in ("best", "last"):
        save_checkpoint(tmp_path / "checkpoints" / f"{name}.pt", {"name": name})
    assert load_checkpoint(tmp_path)["name"] == "best"
    assert load_checkpoint(tmp_path, which="last")["name"] == "last"
    (tmp_path / "checkpoints" / "best.pt").unlink()
    with pytest.raises(CheckpointError, match=r"has no checkpoints/best\.pt\. fix: try last\.pt in "):
        load_checkpoint(tmp_path)


def test_no_checkpoint_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"there is no checkpoint {tmp_path}/x\.pt\. fix: "):
        load_checkpoint(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"the folder {tmp_path} has no checkpoints/best\.pt\. fix: give"):
        load_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no|there is no"):
        load_last(tmp_path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, sample_state())
    content = path.read_bytes()
    for length in [0, 1, *range(7, len(content), len(content) // 20), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"a\.pt is damaged.*fix: "):
            load_checkpoint(path)


def test_a_flipped_bit_is_refused_or_without_effect(tmp_path: Path) -> None:
    path, state = tmp_path / "a.pt", sample_state()
    save_checkpoint(path, state)
    content = path.read_bytes()
    refused = 0
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
    with pytest.raises(CheckpointError, match=r"not a checkpoint of this project\. fix: .*model\.weights"):
        load_checkpoint(path)
    torch.save({"format": "hydra-yolov3-spp checkpoint", "version": 99, "state": {}}, path)
    with pytest.raises(CheckpointError, match="format version 99, this program reads 1"):
        load_checkpoint(path)
    for write in (lambda: torch.save({"state": Malicious(canary)}, path), lambda: path.write_bytes(b"\0" * 1000)):
        write()
        with pytest.raises(CheckpointError) as caught:
            load_checkpoint(path)
        assert str(caught.value) == (
            f"{path} is damaged, or not a checkpoint of this project. fix: give a run folder or a .pt file of train.py"
        )
    with path.open("wb") as file:
        pickle.dump(Malicious(canary), file)
    with pytest.raises(CheckpointError):
        load_checkpoint(path)
    assert not canary.exists()


NAMES = ("last", "last.previous", "best")


@pytest.mark.parametrize("there", [NAMES, ("last", "best"), ("last.previous", "best"), ("best",)])
@pytest.mark.parametrize("damaged", [(), ("last",), ("best",), ("last", "last.previous"), ("best", "last")])
def test_the_first_file_that_can_be_read_counts(
    there: tuple[str, ...], damaged: tuple[str, ...], tmp_path: Path
) -> None:
    """The message names what is unusual and is None otherwise."""
    folder = tmp_path / "checkpoints"
    good = [name for name in there if name not in damaged]
    for name in there:
        save_checkpoint(folder / f"{name}.pt", {"name": name})
        if name in damaged:
            content = (folder / f"{name}.pt").read_bytes()
            (folder / f"{name}.pt").write_bytes(content[: len(content) // 2])
    if not good:
        with pytest.raises(CheckpointError) as caught:
            load_last(tmp_path)
        assert all(f"{name}.pt is damaged" in str(caught.value) for name in there)
        assert " try " not in str(caught.value), "every file was tried"
        return
    state, message = load_last(tmp_path)
    assert state["name"] == good[0]
    tried = [name for name in there[: there.index(good[0])]]
    if good[0] == "last":
        assert message is None
    else:
        assert message is not None and f"{good[0]}.pt" in message
        assert all(f"{name}.pt is damaged" in message for name in tried) and "fix:" not in message


def test_a_flipped_bit_in_the_newest_file_leaves_the_one_before(tmp_path: Path) -> None:
    """The step can still be read, the digest is wrong."""
    last = tmp_path / "checkpoints" / "last.pt"
    for step in (1, 2):
        save_checkpoint(last, {"epoch": 0, "step": step, "weights": torch.full((1000,), 0.1)}, keep_previous=True)
    content = bytearray(last.read_bytes())
    content[content.index(torch.full((9,), 0.1).numpy().tobytes())] ^= 1
    last.write_bytes(content)
    state, message = load_last(tmp_path)
    assert state["step"] == 1 and message is not None and "last.pt is damaged" in message


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    save_checkpoint(path, {"epoch": 1})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # fails in mid-write, as a full disk does
    try:
        with pytest.raises(CheckpointError, match=rf"cannot write {path}: .*[\d,]+ bytes are free.*fix: "):
            save_checkpoint(path, {"big": torch.zeros(100_000)}, keep_previous=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert load_checkpoint(path) == {"epoch": 1}
    assert os.listdir(tmp_path) == ["a.pt"]


def test_writes_that_fail_in_a_row_are_told_once_and_end_with_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    writer, full = CheckpointWriter(tmp_path, said.append), [True]

    def save(path: Path, *_: object) -> None:
        if full[0]:
            raise CheckpointError(f"cannot write {path}")

    monkeypatch.setattr(checkpoint, "save_checkpoint", save)
    for full[0] in (True, True, False, True, True):
        writer.save({"step": 1}, is_best=True)
        writer.wait()
    lines = [line.partition(". ")[0] for line in said]
    assert lines == [f"cannot write {tmp_path}/checkpoints/best.pt", "checkpoints can be written again", lines[0]]
    with pytest.raises(CheckpointError, match="cannot write"):
        writer.close()
    assert len(said) == 3, "the error says it"


def test_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/a\.pt"):
        save_checkpoint(tmp_path / "file" / "a.pt", {})
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(CheckpointError, match=r"cannot write .*folder\.pt"):
        save_checkpoint(tmp_path / "folder.pt", {})
    assert sorted(os.listdir(tmp_path)) == ["file", "folder.pt"]


def test_what_a_kill_left_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "a.pt.tmp").write_bytes(b"half a checkpoint")
    save_checkpoint(tmp_path / "a.pt", {"epoch": 1})
    assert os.listdir(tmp_path) == ["a.pt"]
