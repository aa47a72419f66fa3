"""The plugins of docs/examples: trained with, resumed, scored; refused if missing or changed."""

from __future__ import annotations

import json
import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from conf.answers.help import page_instead
from conf.build.loss import make_loss
from conf.build.network import build_model, load_network
from conf.entry import compose
from conf.extensions.using import with_plugins
from conf.failures import ConfigError
from conf.schema import EvalConfig, TrainConfig
from conf.schema_inference import ExportConfig, PredictConfig
from conf.schema_tools import ConvertConfig
from conf.sources.checkpoints import complete_conversion, complete_from_checkpoint, model_or_checkpoint
from conf.sources.resume import complete_training
from data import Annotations, DataError, ImageSource, Request, ShapesConfig, TrainDataset, open_annotations
from data.batches.changed import AUGMENTATIONS, ChangedDataset
from eval import evaluate
from models import Darknet, ModelError, parse_cfg, save_darknet_weights
from tests.models.cfg_writer import cfg, conv, head, section
from tests.small_run import small_run
from train import train
from train_utils.errors import CheckpointError, TrainError
from train_utils.loop.stop_and_save import Decision, StepDecisions
from train_utils.run.checkpoint import load_last

EXAMPLES = Path(__file__).resolve().parents[3] / "docs" / "examples" / "plugins"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CFG = cfg(
    conv(8, 3, 4, "squareplus"), section("squeeze", ratio=4), conv(16, 3, 4), head(0, 1, 2, classes=5)
)  # fmt: skip
SHAPES = ShapesConfig(train_images=16, val_images=4, image_size=64, seed=0)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of each example and my.cfg, which uses them."""
    folder = tmp_path_factory.mktemp("plugins")
    for name in NAMES:
        shutil.copy(EXAMPLES / f"{name}.py", folder)
    (folder / "my.cfg").write_text(CFG)
    return folder


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    with_plugins({"plugins": [], "plugins_sha256": {}, "plugin": {}})


def listed(folder: Path, names: list[str] = NAMES) -> str:
    return f"plugins=[{','.join(str(folder / f'{name}.py') for name in names)}]"


def options(folder: Path, run: Path, *more: str) -> TrainConfig:
    """Two steps with every example; ``more`` comes last."""
    chosen = ["loss=balanced", "optim=lion", "plugin.squareplus.bend=2"]
    return small_run(
        folder / "shapes", SHAPES, run, listed(folder), f"model.cfg={folder / 'my.cfg'}", "model.width=1",
        "train.epochs=1", "train.batch_size=8", "train.save_every_steps=1", *chosen, *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(files: Path) -> Path:
    """A run of two steps with every example."""
    train(options(files, files / "run"))
    return files / "run"


def resumed(run: Path, *more: str) -> TrainConfig:
    return compose("train", TrainConfig, [f"resume={run}", *more], complete_training)


def scored(run: Path, *more: str) -> EvalConfig:
    return compose("eval", EvalConfig, [f"ckpt={run}", "device=cpu", *more], complete_from_checkpoint)


def test_a_run_is_resumed_and_scored_without_naming_its_plugins(
    run: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = StepDecisions.decide

    def dies(self: StepDecisions, finite: bool, steps_done: int) -> Decision:
        if steps_done > 1:
            raise TrainError("power cut")
        return decide(self, finite, steps_done)

    with monkeypatch.context() as patch, pytest.raises(TrainError, match="power cut"):
        patch.setattr(StepDecisions, "decide", dies)
        train(options(files, tmp_path / "cut"))
    with_plugins({"plugins": [], "plugins_sha256": {}, "plugin": {}})
    train(resumed(tmp_path / "cut"))
    whole, cut = (load_last(folder)[0] for folder in (run, tmp_path / "cut"))
    assert whole["config"]["plugin"]["squareplus"] == {"bend": 2.0}
    assert whole["config"]["plugins"] == [str(files / f"{name}.py") for name in NAMES]
    assert set(whole["config"]["plugins_sha256"]) == set(NAMES)
    for part in ("model", "ema"):
        assert all(torch.equal(tensor, cut[part][name]) for name, tensor in whole[part].items())
    assert evaluate(scored(run)).keys() == evaluate(scored(run, listed(files))).keys()


@pytest.mark.parametrize("program", ["train", "eval", "predict", "export", "convert"])
@pytest.mark.parametrize("fault", ["missing", "changed", "left out"])
def test_a_plugin_that_is_not_there_or_changed_is_refused_by_name(
    program: str, fault: str, run: Path, files: Path, tmp_path: Path
) -> None:
    given = []
    if fault == "left out":
        given = [listed(files, ["squeeze_layer"])]
        said = "needs the plugin balanced_loss .* too. fix: plugins="
    else:
        for name in NAMES:
            shutil.copy(files / f"{name}.py", tmp_path)
        path = tmp_path / "lion_optimiser.py"
        given = [listed(tmp_path)]
        if fault == "missing":
            path.unlink()
            said = f"there is no {path}.* fix: plugins="
        else:
            path.write_text(path.read_text() + "# another\n")
            said = f"plugin {path} has changed: its SHA-256 was .* fix: the file as it was, or "
    with pytest.raises(ConfigError, match=said):
        if program == "train":
            resumed(run, *given)
        elif program == "eval":
            scored(run, *given)
        elif program == "convert":
            compose("convert", ConvertConfig, [f"ckpt={run}", "out=x.weights", *given], complete_conversion)
        elif program == "predict":
            compose("predict", PredictConfig, [f"ckpt={run}", "source=x", *given], model_or_checkpoint)
        else:
            compose("export", ExportConfig, [f"ckpt={run}", *given], model_or_checkpoint)


def test_a_changed_plugin_is_taken_if_the_user_says_so(run: Path, files: Path, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copy(files / f"{name}.py", tmp_path)
    (tmp_path / "lion_optimiser.py").write_text((files / "lion_optimiser.py").read_text() + "# another\n")
    forced = resumed(run, listed(tmp_path), "resume_force=true")
    assert forced.plugins[0].startswith(str(tmp_path))
    new = forced.plugins_sha256["lion_optimiser"]
    scored(run, listed(tmp_path), f"plugins_sha256.lion_optimiser={new}")
    with pytest.raises(CheckpointError, match=r"plugins_sha256.lion_optimiser: \w+ -> "):
        train(resumed(run, listed(tmp_path), f"plugins_sha256.lion_optimiser={new}"))


def test_what_acts_by_being_listed_acts(run: Path) -> None:
    groups = [json.loads(line)["group"] for line in (run / "lines.jsonl").read_text().splitlines()]
    assert {"epoch", "val", "speed"} <= set(groups)


def test_options_of_plugins_are_options(run: Path, files: Path) -> None:
    """Shown by --help, typed, checked, and compared on resume."""
    page = page_instead("train", "train.py", TrainConfig, ["--help", listed(files), "plugin.squareplus.bend=3"])
    for text in ("layer squeeze", "ratio=16", "plugin.squareplus.bend=3.0", "loss balanced", "optimiser lion"):
        assert text in page
    for option, said in (
        ("plugin.squareplus.bent=3", "no option plugin.squareplus.bent; did you mean plugin.squareplus.bend"),
        ("plugin.squareplus.bend=much", "plugin.squareplus.bend: Value 'much' of type 'str'"),
        ("plugin.squareplus.bend=-1", "plugin.squareplus: bend must be 0 or more, got -1"),
        ("plugin.squarplus.bend=1", "no option plugin.squarplus: there are "),
        ("plugins=[nowhere.py]", "there is no .*nowhere.py. fix"),
        ("plugins=[nowhere]", "no installed package has the entry point nowhere"),
        ("plugins=nowhere.py", "fix: plugins=.mine.py"),
        ("plugins=[a.py],[b.py]", "takes one list"),
    ):
        with pytest.raises(ConfigError, match=said):
            options(files, files / "other", option)
    assert scored(run, "plugin.squareplus.bend=3").plugin["squareplus"] == {"bend": 3.0}
    with pytest.raises(CheckpointError, match=r"would change \(plugin.squareplus.bend: 2.0 -> 3.0\)"):
        train(resumed(run, listed(files), "plugin.squareplus.bend=3"))


def test_a_section_is_checked_as_darknet_s_are(files: Path, tmp_path: Path) -> None:
    for line, said in (
        ("ratio=0", r"my.cfg:\d+: \[squeeze\] ratio must be 1 or more"),
        ("ratio=x", r"my.cfg:\d+: \[squeeze\] ratio needs a whole number"),
        ("ration=4", r"my.cfg:\d+: \[squeeze\] has no option ration; did you mean ratio"),
    ):
        (tmp_path / "my.cfg").write_text(CFG.replace("ratio=4", line))
        given = compose("convert", ConvertConfig, ["out=a.pt", listed(files), f"model.cfg={tmp_path / 'my.cfg'}"])
        with pytest.raises(ModelError, match=said):
            build_model(given.model, None)
    compose("convert", ConvertConfig, ["out=a.pt", "model.cfg=yolov3-tiny"])  # its plugins are none
    with pytest.raises(ModelError, match=r"there is no layer .squeeze."):
        load_network(given.model)


def test_darknet_s_files_do_not_lose_weights_without_a_word(files: Path, tmp_path: Path) -> None:
    given = compose("convert", ConvertConfig, ["out=a.pt", listed(files), f"model.cfg={files / 'my.cfg'}"])
    model, _ = build_model(given.model, None)
    with pytest.raises(ModelError, match=r"no place for the weights of layer 1, a \[squeeze\]. fix: up_to_layer=1"):
        save_darknet_weights(model, tmp_path / "x.weights")
    save_darknet_weights(model, tmp_path / "x.weights", up_to_layer=1)


def test_a_format_is_read_as_the_same_set_in_coco_s(files: Path, tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        cv2.imwrite(str(images / name), np.zeros((40, 60, 3), np.uint8))
    rows = ["a.png cat 1 2 11 22", "a.png dog 5 5 9 30", "b.png cat 0 0 60 40"]
    (tmp_path / "set.txt").write_text("\n".join(rows))

    def opened(*more: str) -> Annotations:
        both = ["data.train.annotations=set.txt", "data.train.images=images", "data.val.images=images"]
        named = [listed(files, ["lines_format"]), "data.format=lines", f"data.root={tmp_path}"]
        index = f"data.index_dir={tmp_path / 'index'}"
        return open_annotations(compose("train", TrainConfig, [*named, *both, index, *more]).data, "train")

    found = opened()
    assert found.names == ["cat", "dog"] and found.sizes.tolist() == [[40, 60], [40, 60]]
    assert found.boxes_xywh.tolist() == [[1, 2, 10, 20], [5, 5, 4, 25], [0, 0, 60, 40]]
    with pytest.raises(DataError, match=r"set.txt: data.format=lines failed \(ValueError"):
        opened("plugin.lines.separator=x")  # other options: not the index of before
    with pytest.raises(ConfigError, match=r"data.format must be coco, voc, yolo, shapes, signs, or that of a plugin"):
        compose("train", TrainConfig, ["data.format=lines"])


def test_an_augmentation_depends_on_the_request_alone_also_in_another_process(
    files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options(files, tmp_path / "run", "plugin.cutout.probability=1", "plugin.cutout.side=0.5")
    annotations = open_annotations(config.data, "train")
    source = ImageSource(annotations, config.data.on_error)
    made_of = annotations, config.augment, 0, 1, source
    dataset, plain = ChangedDataset(AUGMENTATIONS, *made_of), TrainDataset(*made_of)
    requests = [Request(index, 64, 64, 0) for index in range(8)]
    whole, before = dataset.__getitems__(requests), plain.__getitems__(requests)
    grey = (whole.images == 114).all(dim=1).sum(dim=(1, 2))
    assert (grey >= 32 * 32).all() and 0 < len(whole.targets) <= len(before.targets)
    pickled = pickle.dumps(dataset)
    monkeypatch.setattr("conf.extensions.loading._loaded", {})  # a spawned worker has loaded nothing
    monkeypatch.delitem(sys.modules, "plugin_cutout_augmentation")
    again = pickle.loads(pickled)
    for number, request in enumerate(requests):
        alone = again.__getitems__([request])
        assert torch.equal(alone.images[0], whole.images[number])
        assert torch.equal(alone.targets[:, 1:], whole.targets[whole.targets[:, 0] == number][:, 1:])
    path = files / "cutout_augmentation.py"
    text = path.read_bytes()
    path.write_bytes(text + b"# another\n")
    with pytest.raises(ConfigError, match=r"cutout_augmentation\.py has changed since this program started"):
        pickle.loads(pickled)
    path.write_bytes(text)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("loss=darknet", "loss=darknet takes no assigner, as best. fix: loss=yolov3"),
    ],
)
def test_what_cannot_act_is_refused(given: str, said: str, files: Path, tmp_path: Path) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        train(options(files, tmp_path / "run", given))


def test_the_assigner_s_pairs_are_learnt(files: Path) -> None:
    """One target at its best anchor, in its cell and in two neighbours; a row of zeros nowhere."""
    section_loss = compose("train", TrainConfig, [listed(files, ["best_assigner"])]).loss
    model = Darknet(parse_cfg(cfg(conv(8, 3, 4), conv(16, 3, 4), head(0, 1, 2)), "x"))
    raw = torch.zeros(1, 3, 4, 4, 7, requires_grad=True)
    targets = torch.tensor([[0, 1, 20.0, 30.0, 11.0, 11.0], [0, 0, 0, 0, 0, 0]])
    make_loss(model.heads, section_loss)([raw], targets).total.backward()
    assert raw.grad is not None
    assert (raw.grad[0, ..., 2] != 0).nonzero().tolist() == [[1, 1, 0], [1, 1, 1], [1, 2, 1]]
