"""The plugins of docs/examples: trained with, resumed, scored; only a user imports them."""

import json
import pickle
import shutil
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from conf import ConfigError
from conf.cli.program import options_of
from conf.schema import TrainConfig
from data import Annotations, ImageSource, Request, TrainDataset, open_annotations
from eval import evaluate
from models import ModelError
from plugins import AUGMENTATIONS, LOGGERS, import_plugins
from tests.models.cfg_writer import cfg, conv, head, section
from tests.small_run import dying_after, small_run
from train import train
from train_utils.build import build_model, load_network
from train_utils.checkpoint import load_last

EXAMPLES = Path(__file__).resolve().parents[1] / "docs" / "examples" / "plugins"
NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
CFG = cfg(conv(8, 3, 4), section("squeeze", ratio=4), conv(16, 3, 4), head(0, 1, 2, classes=5))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "my.cfg").write_text(CFG)
    return folder


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    import_plugins([])


def listed(*names: str) -> str:
    return f"plugins=[{','.join(str(EXAMPLES / f'{name}.py') for name in names or NAMES)}]"


def options(folder: Path, run: Path, *more: str) -> TrainConfig:
    return small_run(
        folder / "shapes", run, listed(), f"model.cfg={folder / 'my.cfg'}", "model.width=1", "train.epochs=1",
        "train.batch_size=8", "train.save_every_steps=1", "loss=yolov3", "loss.name=balanced", "optim.name=radam",
        *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(files: Path) -> Path:
    train(options(files, files / "run"))
    return files / "run"


def test_a_run_is_resumed_and_scored(run: Path, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with dying_after(monkeypatch, 1):
        train(options(files, tmp_path / "cut"))
    train([f"resume={tmp_path / 'cut'}", listed()])
    whole, cut = (load_last(folder)[0] for folder in (run, tmp_path / "cut"))
    assert whole["config"]["plugins"] == [f"{name}.py" for name in NAMES]
    for part in ("model", "ema"):
        assert all(torch.equal(tensor, cut[part][name]) for name, tensor in whole[part].items())
    assert "AP" in evaluate([f"ckpt={run}", "device=cpu", listed("squeeze_layer")])
    groups = [json.loads(line)["group"] for line in (run / "lines.jsonl").read_text().splitlines()]
    assert {"train_epoch", "val", "train_speed"} <= set(groups)


def test_what_was_trained_with_plugins_asks_for_them(run: Path) -> None:
    for command in ("train resume=", "eval ckpt=", "predict source=x ckpt=", "convert out=x ckpt="):
        with pytest.raises(ConfigError, match=r"=\S+ needs plugins=\[balanced_loss.py,.*fix: give their paths"):
            program, *given = f"{command}{run}".split()
            options_of(program, given)
    with pytest.raises(ModelError, match=r"there is no layer '.squeeze.'"):
        evaluate([f"ckpt={run}", "device=cpu", "plugins=[]"])


def test_the_activation_on_the_page(tmp_path: Path) -> None:
    page = (EXAMPLES.parents[1] / "develop" / "extending.md").read_text()
    code = page.partition("    from torch")[2].partition("\n\n|")[0]
    (tmp_path / "of_the_page.py").write_text(textwrap.dedent(f"    from torch{code}"))
    (tmp_path / "my.cfg").write_text(cfg(conv(2, activation="squareplus"), head(0, 1, 2, classes=5)))
    named = [f"plugins=[{tmp_path / 'of_the_page.py'}]", f"model.cfg={tmp_path / 'my.cfg'}"]
    model, _ = build_model(options_of("train", named).model, None)
    values = torch.randn(9)
    activation = next(module for module in model.modules() if type(module).__name__ == "Squareplus")
    torch.testing.assert_close(activation(values), (values + (values**2 + 4) ** 0.5) / 2)


def test_what_another_command_of_this_process_names_is_not_in_use(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        f"# @package _global_\nplugins: ['{EXAMPLES / 'balanced_loss.py'}', '{EXAMPLES / 'cutout_augmentation.py'}']\n"
        "defaults: [{override /loss: yolov3}]\nloss: {name: balanced, box: 5}\n"
    )
    for _ in range(2):
        loss = options_of("train", [f"experiment={tmp_path / 'own.yaml'}"]).loss
        assert (loss.name, loss.box) == ("balanced", 5)
        assert list(AUGMENTATIONS) == ["cutout"] and not LOGGERS
        with pytest.raises(
            ConfigError, match=r"loss.name=balanced is not known. fix: one of auto, yolov3, yolox, darknet, or plugins="
        ):
            options_of("train", ["loss.name=balanced"])
        assert not AUGMENTATIONS


def test_a_wrong_name_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("1 / 0")
    (tmp_path / "halved.py").write_text("1 / 0")
    for given, said in (
        (tmp_path / "nowhere.py", "there is no .*nowhere.py. fix: "),
        (tmp_path / "json.py", "import json does not find .*json.py. fix: rename the file"),
        (tmp_path / "halved.py", r"failed \(ZeroDivisionError: division by zero\). fix: mend the file; "),
    ):
        with pytest.raises(ConfigError, match=said):
            options_of("train", [f"plugins=[{given}]"])


def test_a_section_is_checked_as_darknet_s_are(files: Path, tmp_path: Path) -> None:
    for line, said in (
        ("ratio=0", r"my.cfg:\d+: \[squeeze\] ratio must lie in 1"),
        ("ration=4", r"my.cfg:\d+: \[squeeze\] has no option 'ration'; did you mean ratio"),
    ):
        (tmp_path / "my.cfg").write_text(CFG.replace("ratio=4", line))
        given = options_of("train", [listed(), f"model.cfg={tmp_path / 'my.cfg'}"])
        with pytest.raises(ModelError, match=said):
            build_model(given.model, None)
    options_of("train", [])
    with pytest.raises(ModelError, match=r"there is no layer '.squeeze.'"):
        load_network(given.model)


def test_a_format_is_read_as_the_same_set_in_coco_s(tmp_path: Path) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for name in ("a.png", "b.png"):
        cv2.imwrite(str(images / name), np.zeros((40, 60, 3), np.uint8))
    rows = ["a.png cat 1 2 11 22", "a.png dog 5 5 9 30", "b.png cat 0 0 60 40"]
    (tmp_path / "set.txt").write_text("\n".join(rows))
    plugin = Path(shutil.copy(EXAMPLES / "lines_format.py", tmp_path / "own_lines.py"))

    def opened() -> Annotations:
        both = ["data.train.annotations=set.txt", "data.train.images=images", "data.val.images=images"]
        named = [f"plugins=[{plugin}]", "data.format=lines", f"data.root={tmp_path}"]
        index = f"data.index_dir={tmp_path / 'index'}"
        return open_annotations(options_of("train", [*named, *both, index]).data, "train")

    for _ in range(2):
        found = opened()
        assert found.names == ["cat", "dog"] and found.sizes.tolist() == [[40, 60], [40, 60]]
        assert found.boxes_xywh.tolist() == [[1, 2, 10, 20], [5, 5, 4, 25], [0, 0, 60, 40]]
    assert len(list((tmp_path / "index").glob("[!.]*"))) == 1
    plugin.write_text(plugin.read_text() + "# another\n")
    opened()
    assert len(list((tmp_path / "index").glob("[!.]*"))) == 2  # another reader, another index
    with pytest.raises(ConfigError, match=r"data.format must be .*, or that of one of plugins=, got lines"):
        options_of("train", ["data.format=lines"])


def test_an_augmentation_depends_on_the_request_alone_also_in_another_process(files, tmp_path, monkeypatch) -> None:
    config = options(files, tmp_path / "run")
    annotations = open_annotations(config.data, "train")
    make = partial(
        TrainDataset, annotations, ImageSource(annotations, config.data.on_error), config.augment, seed=0, epochs=1
    )
    dataset, plain = make(changes=AUGMENTATIONS), make()
    requests = [Request(index, 64, 64, 0) for index in range(8)]
    whole, before = dataset.__getitems__(requests), plain.__getitems__(requests)
    grey = (whole.images == 114).all(dim=1).sum(dim=(1, 2))
    assert (grey >= 13 * 13).any() and 0 < len(whole.targets) <= len(before.targets)
    seen, wide = list[float](), [Request(0, 64, 128, 0, repeat) for repeat in range(2)]
    spy = lambda sample, generator: (seen.append(generator.random()), sample)[1]  # noqa: E731
    spied = make(changes={"spy": spy, "other": spy})
    assert torch.allclose(spied.__getitems__(wide).targets, plain.__getitems__(wide).targets) and len(set(seen)) == 4
    pickled = pickle.dumps(dataset)
    monkeypatch.delitem(sys.modules, "cutout_augmentation")  # a spawned worker has loaded nothing
    again = pickle.loads(pickled)
    for number, request in enumerate(requests):
        alone = again.__getitems__([request])
        assert torch.equal(alone.images[0], whole.images[number])
        assert torch.equal(alone.targets[:, 1:], whole.targets[whole.targets[:, 0] == number][:, 1:])
