"""The proof of a run holds, and names whatever was changed since."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import pytest
import yaml

import scripts.verify as program
from conf.build.agreement import PROGRAM, ROOT
from conf.entry import compose
from conf.proof import check
from conf.schema_tools import VerifyConfig
from data import ShapesConfig
from tests.small_run import small_run
from train import train
from train_utils.errors import TrainError
from train_utils.report.proof import read_proof, write_proof

SHAPES = ShapesConfig(train_images=40, val_images=4, image_size=64, seed=0)
HASHES = ("steps=0", "score=false")


class Place(NamedTuple):
    """A run and its data, which a test may spoil."""

    run: Path
    data: Path


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Two epochs of ten steps; a checkpoint lies eight steps before the end."""
    root = tmp_path_factory.mktemp("honest")
    (root / "run").mkdir()
    more = ("train.epochs=2", "train.batch_size=4", "evaluate.every=1", "train.deterministic=true")
    train(small_run(root / "shapes", SHAPES, root / "run", *more))
    return Place(root / "run", root / "shapes")


@pytest.fixture
def copied(honest: Place, tmp_path: Path) -> Place:
    """Both at another place, as after a move."""
    return Place(
        Path(shutil.copytree(honest.run, tmp_path / "moved")), Path(shutil.copytree(honest.data, tmp_path / "data"))
    )


def options_for(place: Place, *more: str) -> VerifyConfig:
    return compose("verify", VerifyConfig, [f"run={place.run}", f"data_root={place.data}", *more])


def verify(place: Place, *more: str) -> None:
    program.verify(options_for(place, *more))


def test_an_honest_run_holds_wherever_it_lies(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    verify(copied)
    said, progress = capsys.readouterr()
    assert said.endswith("nothing differs\n") and "not checked" not in said and "epoch" not in progress
    assert "same weights after steps 12 to 20" in said
    assert not (copied.run / ".verify").exists()


def image(place: Place, split: str) -> Path:
    return sorted(place.data.rglob(f"{split}/*.jpg"))[1]


def change_pixel(place: Place) -> str:
    path = image(place, "train")
    picture = cv2.imread(str(path))
    picture[0, 0] ^= 255
    cv2.imwrite(str(path), picture)
    return rf"train data +DIFFERS +{path.name} \(image\)"


def edit_json(place: Place, split: str, edit: Callable[[dict[str, Any]], None]) -> None:
    (path,) = place.data.rglob(f"instances_{split}.json")
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def change_label(place: Place) -> str:
    edit_json(place, "val", lambda content: content["annotations"][0].update(area=7.0))
    return r"val data +DIFFERS +\d+\.jpg \(labels\)"


def add_image(place: Place) -> str:
    path = image(place, "train")
    shutil.copy(path, path.with_name("new.jpg"))
    edit_json(
        place,
        "train",
        lambda content: content["images"].append(content["images"][1] | {"id": 999, "file_name": "new.jpg"}),
    )
    return r"train data +DIFFERS +new.jpg was added"


def remove_image(place: Place) -> str:
    image(place, "val").unlink()
    return r"DIFFERS .*" + image(place, "val").parent.name


def replace_text(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text(), count=1)
    assert count == 1
    path.write_text(text)


def change_option(place: Place) -> str:
    replace_text(place.run / "config.yaml", "weight_decay: .*", "weight_decay: 0.25")
    return r"options +DIFFERS +optim.weight_decay: .* -> 0.25"


def change_checkpoint(place: Place) -> str:
    path = place.run / "checkpoints" / "best.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return r"files +DIFFERS +checkpoints/best.pt"


def change_figure(place: Place) -> str:
    replace_text(place.run / "proof.json", '"AR100": .*,', '"AR100": 0.9,')
    return r"proof +DIFFERS"


def lose_table(place: Place) -> str:
    (place.run / "proof_data.csv").unlink()
    return r"files +DIFFERS +proof_data.csv"


IMAGES = [change_pixel, change_label, add_image, remove_image]


@pytest.mark.parametrize("spoil", [*IMAGES, change_option, change_checkpoint, change_figure, lose_table])
def test_what_was_changed_is_named(
    copied: Place, spoil: Callable[[Place], str], capsys: pytest.CaptureFixture[str]
) -> None:
    expected = spoil(copied)
    with pytest.raises(SystemExit, match="1"):
        verify(copied, *HASHES)
    said = capsys.readouterr().out
    assert re.search(expected, said), said
    assert said.count("DIFFERS") == 1, said


def test_a_figure_is_scored_again(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    change_figure(copied)
    with pytest.raises(SystemExit, match="1"):
        verify(copied, "steps=0")
    assert re.search(r"figures +DIFFERS +AR100: 0.9 -> 0\.\d+", capsys.readouterr().out)


def test_other_packages_hardware_and_steps(
    honest: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "packages", lambda: read_proof(honest.run)["packages"] | {"numpy": "0.1"})
    monkeypatch.setattr(program, "hardware", lambda world: "an abacus")
    monkeypatch.setattr(check, "initial_weights", lambda options: {"sha256": "of another file"})
    with pytest.raises(SystemExit, match="1"):
        verify(honest, "steps=7", "score=false")
    said = capsys.readouterr().out
    assert re.search(r"packages +DIFFERS +numpy: .* -> 0.1\n", said)
    assert re.search(r"hardware +DIFFERS .* -> an abacus: bits may differ\n", said)
    assert re.search("last steps +not checked +they are 8. fix: steps=8", said)
    assert said.endswith("differs: first weights, packages, hardware\n")


def test_a_changed_line_of_code_is_named(honest: Place, tmp_path: Path) -> None:
    for part in PROGRAM:
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.glob("*.py"):
        shutil.copy(path, tmp_path)
    proof = read_proof(honest.run)
    options = program.options_of(proof["starts"][0], options_for(honest))
    assert [found.holds for found in check.check_program(proof, options, tmp_path)] == [True, True]
    replace_text(tmp_path / "train_utils" / "optim.py", "import math", "import  math")
    (code, _) = check.check_program(proof, options, tmp_path)
    assert (code.holds, code.detail) == (False, "train_utils/optim.py")


def test_what_no_image_s_digests_show_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class names and ids are in the digest of the set alone, and the table may be missing."""
    rows = [("a.jpg", "1", "2")]
    monkeypatch.setattr(check, "hash_set", lambda part, shown: (rows, "now"))
    part: Any = None

    def found(whole: str) -> check.Check:
        proof = {"data": {"val": {"sha256": whole}}}
        return next(check.check_data(tmp_path, proof, {"val": part}))

    assert (found("then").holds, found("now").holds) == (False, True)
    assert found("then").detail == "something that proof_data.csv named"
    (tmp_path / "proof_data.csv").write_text("set,file,sha256,labels\nval,a.jpg,1,2\n")
    assert found("then")[1:] == (False, "class names, order, ids or outlines")
    assert found("now").holds


def test_a_run_that_is_not_finished(copied: Place) -> None:
    replace_text(copied.run / "proof.json", '"finished": true', '"finished": false')
    with pytest.raises(TrainError, match=r"has not finished\. fix: python train\.py resume="):
        verify(copied)
    (copied.run / "proof.json").unlink()
    with pytest.raises(TrainError, match=r"holds no proof\.json"):
        verify(copied)


def rewrite(run: Path, edit: Callable[[dict[str, Any]], None]) -> None:
    """Edit a proof, and what it says of itself."""
    proof = read_proof(run)
    edit(proof)
    write_proof(run, proof)


def test_a_run_of_an_earlier_version_and_of_another_machine(
    copied: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options that it did not know, a service and a folder that are not here, a read-only run."""
    config = yaml.safe_load((copied.run / "config.yaml").read_text())
    del config["train"]["patience"], config["plugin"]
    config["optim"]["ema_ramp_steps"] = 2000.0  # an option that is gone
    config["logger"] |= {"wandb": {"project": "p", "entity": None, "offline": False}}
    config["data"]["index_dir"] = "/proc/nobody/index"
    (copied.run / "config.yaml").write_text(yaml.safe_dump(config))
    rewrite(copied.run, lambda proof: proof["starts"][0].update(options=config))
    monkeypatch.setattr("train_utils.loggers.config.is_installed", lambda name: False)
    monkeypatch.setattr("os.access", lambda path, mode: False)
    monkeypatch.chdir(copied.data)
    monkeypatch.setattr("tempfile.tempdir", str(copied.data.parent))
    before = sorted(copied.run.rglob("*"))
    verify(copied)
    assert capsys.readouterr().out.endswith("nothing differs\n")
    assert sorted(copied.run.rglob("*")) == before and not list(copied.data.parent.glob(".verify*"))


def test_what_an_edited_proof_lacks_is_named(copied: Place) -> None:
    rewrite(copied.run, lambda proof: proof.pop("files"))
    with pytest.raises(TrainError, match=r"proof\.json has no entry 'files'\. fix: restore it"):
        verify(copied)
    (copied.run / "proof.json").write_text("[1]")
    with pytest.raises(TrainError, match=r"proof\.json cannot be read .* fix: restore it"):
        verify(copied)


def test_steps_of_several_starts(copied: Place, capsys: pytest.CaptureFixture[str]) -> None:
    """Of one process and of two; the last start only scored."""

    def restart(proof: dict[str, Any]) -> None:
        first = proof["starts"][0]
        first["options"]["train"]["deterministic"] = False
        proof["starts"] += [first | {"step": 5, "processes": 2}, first | {"step": 20, "processes": 4}]

    rewrite(copied.run, restart)
    replace_text(copied.run / "config.yaml", "deterministic: true", "deterministic: false")
    verify(copied, "score=false")
    said = capsys.readouterr().out
    assert re.search("last steps +not checked +2 processes trained them, 1 would round differently", said)
