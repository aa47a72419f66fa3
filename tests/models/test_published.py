"""The table of published weights: sizes by the .cfg, and which aliases are refused."""

import re
from pathlib import Path

import pytest
import torch

from models import Darknet, ModelError, with_box_bins, zoo_cfg
from models.cfg import ZOO, ZOO_FOLDER
from models.config import ALIASES, BACKBONE, COCO, COCO_NAMES, PUBLISHED, find_published
from models.darknet import count_flops, count_parameters
from models.weights import weight_tensors
from models.yolox import SIZES
from scripts.get_weights import TITLES


def test_sizes_are_those_of_the_networks() -> None:
    models = {}
    with torch.device("meta"):  # shapes without values
        models = {name: Darknet(zoo_cfg(name)) for name in ZOO}
    written = {path.stem for path in ZOO_FOLDER.glob("*.cfg")} | {f"yolox-{size}" for size in SIZES}
    assert models.keys() == written
    assert all(ZOO[name].backbone_layers <= model.heads[0].layer - 1 for name, model in models.items())
    for entry in PUBLISHED:
        for name in entry.networks:
            end = ZOO[name].backbone_layers if entry.alias == BACKBONE else len(models[name].layers)
            cut = re.search(r"\.conv\.(\d+)$", entry.file_name)
            assert (cut is not None) == (entry.alias == BACKBONE)
            assert cut is None or int(cut[1]) in (end, end - 1), (
                entry.name
            )  # Darknet counts darknet53.conv.74 otherwise
            values = sum(tensor.numel() for layer, _, tensor in weight_tensors(models[name]) if layer < end)
            assert entry.size in (20 + 4 * values, None), (entry.name, name)
        assert entry.size or f"-{entry.sha256}.pth" in entry.url or len(entry.sha256 or "") == 64
    assert len({entry.name for entry in PUBLISHED}) == len(PUBLISHED)
    assert len(COCO_NAMES.read_text().splitlines()) == models["yolov3"].num_classes


def test_one_table_says_which_network_to_take() -> None:
    flops = []
    for name, facts in ZOO.items():
        with torch.device("meta"):
            model = Darknet(with_box_bins(zoo_cfg(name), facts.box_bins or 0))
        flops.append(count_flops(model, (640, 640)))
        assert facts.row[1:3] == [f"{count_parameters(model) / 1e6:.1f} M", f"{flops[-1] / 1e9:.1f}"], name
        has_weights = any(entry.alias == COCO and name in entry.networks for entry in PUBLISHED)
        assert (facts.row[0] != "-") == (facts.row[4] != "-") == has_weights, name
    rows = [TITLES, *([name, *facts.row] for name, facts in ZOO.items())]
    head, *lines = ["| " + " | ".join(row) + " |" for row in rows]
    page = Path("docs/train/pretrained.md").read_text(encoding="utf-8")
    assert "\n".join((head, "|" + "---|" * 7, *lines)) + "\n\n" in page
    assert flops == sorted(flops), "from a laptop's to those for several GPUs"


def test_an_alias_means_one_file_or_is_refused_by_name() -> None:
    for alias in ALIASES:
        for name in ZOO:
            found = [entry for entry in PUBLISHED if entry.alias == alias and name in entry.networks]
            if found:
                assert [find_published(alias, name, 1.0)] == found
            with pytest.raises(
                ModelError, match=rf"weights={re.escape(alias)} is published for .* not for .*={name} and"
            ):
                find_published(alias, name, 0.5 if found else 1.0)
        with pytest.raises(ModelError, match=r"not for model\.cfg=mine/coco\.cfg"):
            find_published(alias, "mine/coco.cfg", 1.0)
    assert find_published("coco.weights", "mine.cfg", 0.5) is None
