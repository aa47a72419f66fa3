"""The description of a .cfg: published sizes, every kind of layer, and errors in one sentence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.entry import compose
from conf.failures import ConfigError
from conf.schema_tools import CfgInfoConfig
from models import ModelError
from scripts.cfg_info import show
from tests.models.cfg.test_fuzz import EVERY_KIND
from tests.models.cfg_writer import cfg, conv, head, route, section

REPOSITORY = Path(__file__).resolve().parents[2]


def described(capsys: pytest.CaptureFixture[str], *overrides: str) -> list[str]:
    show(compose("cfg_info", CfgInfoConfig, list(overrides)))
    return capsys.readouterr().out.splitlines()


# Published: layers, convolutions, parameters, bytes of .weights, GFLOPs at 608 pixels.
@pytest.mark.parametrize(
    ("name", "published"),
    [
        ("yolov3-spp", (114, 76, 62998749, 252209544, 141.45)),
        ("yolov3-tiny", (24, 13, 8852366, 35434956, 11.89)),
        ("yolov4", (162, 110, 64363101, 257717640, 128.39)),
    ],
)
def test_sums_equal_the_published_table(
    name: str, published: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = described(capsys, f"model={name}", "image_size=608")
    layers, convolutions, parameters, stored, gigaflops = published
    assert any(line.endswith(f"{name}.cfg: {layers} layers, {convolutions} convolutions") for line in lines)
    assert f"{parameters:,} parameters, a .weights file has {stored:,} bytes" in lines
    sums = next(line for line in lines if line.endswith("pixels, a multiply-add counting as two"))
    assert float(sums.split()[0]) == pytest.approx(gigaflops, abs=0.1) and "for 608x608 pixels" in sums
    rows = lines[1 : layers + 1]
    assert [int(row.split()[0]) for row in rows] == list(range(layers))
    assert sum(float(row.split()[-1]) for row in rows if "." in row.split()[-1]) == pytest.approx(gigaflops, abs=0.1)
    # The parameters are right-aligned under their title.
    end = lines[0].index("parameters") + len("parameters")
    assert (
        sum(int(row[end - 11 : end].replace(",", "") or 0) for row in rows if row[end - 11 : end].strip()) == parameters
    )


def test_rows_heads_and_options_of_yolov3_spp(capsys: pytest.CaptureFixture[str]) -> None:
    lines = described(capsys, "model=yolov3-spp")
    rows = [" ".join(line.split()) for line in lines]
    assert "78 maxpool 5x5/1 77 512 x 19 x 19" in rows  # the .cfg's own size is 608
    assert "83 route 82, 80, 78, 77 2048 x 19 x 19" in rows
    assert "84 convolutional 512 1x1/1 bn leaky 83 512 x 19 x 19 1,049,600 0.757" in rows
    assert "89 yolo anchors 6,7,8 88 255 x 19 x 19" in rows
    assert any(row.startswith("layer 101: stride 16, map 38 x 38, 80 classes, receptive field ") for row in rows)
    assert rows[-1].startswith("[yolo] ") and "ignore_thresh" in rows[-1]


def test_classes_width_and_size(capsys: pytest.CaptureFixture[str]) -> None:
    lines = described(capsys, "model=yolov3-tiny", "num_classes=1", "model.width=0.5", "image_size=96")
    rows = [" ".join(line.split()) for line in lines]
    assert "0 convolutional 8 3x3/1 bn leaky image 8 x 96 x 96 232 0.004" in rows
    assert any("stride 32, map 3 x 3, 1 class, receptive field 318 x 318 pixels" in row for row in rows)


def test_every_kind_of_layer_fits_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = head(*range(9), anchors=",".join(["100.25,200.75"] * 9), jitter=0.3, nms_kind="greedynms")
    text = EVERY_KIND + route(0) + conv(8, 3, stride_x=2) + section("maxpool", size=8, stride_y=4, stride_x=2) + wide
    (tmp_path / "all.cfg").write_text(text.replace("[net]", "[net]\nbatch=64\nmosaic=1"))
    lines = described(capsys, f"model.cfg={tmp_path}/all.cfg")
    assert max(map(len, lines)) <= 120
    rows = [" ".join(line.split()) for line in lines]
    for row in (
        "2 convolutional 8 3x3/1 shares 1 bn leaky 1 8 x 32 x 32 0.001",
        "3 shortcut per_channel 2, 1 8 x 32 x 32 16",
        "5 route part 1 of 2 4 4 x 16 x 16",
        "6 upsample x2 5 4 x 32 x 32",
        "8 convolutional 16 3x3/1 groups 4 bn leaky 7 16 x 32 x 32 464 0.001",
        "16 maxpool over channels 15 8 x 16 x 16",
        "13 reorg3d /2 12 64 x 16 x 16",
        "24 convolutional 8 3x3/1x2 bn leaky 23 8 x 32 x 16 592 0.001",
    ):
        assert row in rows, rows
    assert "[net] batch, mosaic" in rows and "[yolo] jitter, nms_kind" in rows
    assert any("receptive field the whole image" in row for row in rows)


def test_notes_of_the_cfg_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.cfg").write_text(cfg(conv(8, 3, 2), head(0, anchors="4,6, 10")))
    lines = described(capsys, f"model.cfg={tmp_path}/odd.cfg")
    shown = " ".join(" ".join(lines[lines.index("notes") + 1 :]).split())
    said = "the number of anchor values is odd, a comma may be missing; the last pair is 10,0.5"
    assert f"odd.cfg:21: [yolo] {said}" in shown


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (["image_size=100"], ConfigError, r"cannot take 100x100 pixels, only multiples of 32\. fix: image_size=96"),
        (["model.freeze=3"], ConfigError, r"model\.freeze says nothing about a \.cfg"),
        (["num_classes=0"], ConfigError, r"num_classes must be 1 or more, or null, got 0"),
        (["model.cfg=yolov33"], ModelError, r"there is no model 'yolov33'\. fix: use one of yolov3, "),
    ],
)
def test_mistakes(overrides: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        show(compose("cfg_info", CfgInfoConfig, ["model=yolov3-tiny", *overrides]))


def test_a_cfg_without_size_needs_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bare.cfg"
    path.write_text("[net]\n" + cfg(conv(8, 3, 2), head(0)).split("\n", 4)[4])
    with pytest.raises(ConfigError, match=r"bare\.cfg gives no height and width\. fix: image_size="):
        show(compose("cfg_info", CfgInfoConfig, [f"model.cfg={path}"]))
    assert "2 yolo anchors 0 1 7 x 4 x 4" in [
        " ".join(line.split()) for line in described(capsys, f"model.cfg={path}", "image_size=8")
    ]


@pytest.mark.slow
def test_a_wrong_cfg_is_one_sentence_and_code_2(tmp_path: Path) -> None:
    (tmp_path / "wrong.cfg").write_text(cfg(conv(8, 3, 2).replace("leaky", "leeky"), head(0)))
    program = [sys.executable, "-m", "scripts.cfg_info", f"model.cfg={tmp_path}/wrong.cfg"]
    done = subprocess.run(program, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"error: {tmp_path}/wrong.cfg:11: [convolutional] has no activation leeky; did you mean leaky?\n"
    )
