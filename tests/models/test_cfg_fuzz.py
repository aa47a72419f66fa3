"""Damaged .cfg files: each runs or is refused in one sentence, in bounded time."""

import random
import re
import time

import pytest
import torch

from models import Darknet, ModelError, count_flops, parse_cfg, sections
from models.cfg import SECTION_KEYS, ZOO
from tests.models.cfg_writer import cfg, conv, head, route, section, shortcut

CASES = 250
SMALL = ("0", "1", "2", "3", "4", "8", "16")
HUGE = ("-1", "-7", "100", "255", "1024", "100000", "1000000", "2147483647", "2147483648", "1" + "0" * 30)
ODD = ["", *"0.5 -.25 1e-320 1e400 nan 0x10 \u0661 mish softmax -1,-1 # = \x00".split(" ")]

EVERY_KIND = cfg(
    conv(8, 3, 2), conv(8, 3, dilation=2), conv(8, 3, share_index=-1), shortcut(-2),
    section("maxpool", size=2, stride=2), route(-1, groups=2, group_id=1), section("upsample", stride=2),
    route(-1, 3), conv(16, 3, groups=4, xnor=0), section("avgpool"), conv(16, activation="logistic"),
    section("scale_channels", from_=8), section("dropout", probability=0.1), section("reorg3d", stride=2),
    conv(64), section("sam", from_=-2), conv(14, xnor=1), head(0, 1),
    route(-3), head(2, num=3, new_coords=1, activation="logistic"),
)  # fmt: skip


def thin(text: str) -> str:
    """The .cfg with a sixteenth of its filters except before heads, which makes building cheap."""
    return re.sub(r"filters=(?!255)(\d+)", lambda found: f"filters={max(8, int(found[1]) // 16)}", text)


# Files to damage; half of the draws pick the one with every kind of layer.
ORIGINALS = [thin(path.read_text()) for path in sorted(ZOO.glob("*.cfg"))]
ORIGINALS += [EVERY_KIND] * len(ORIGINALS)


def damaged(text: str, rng: random.Random) -> str:
    """The text with one to three mistakes."""
    lines = text.split("\n")
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind, at = rng.randrange(9), rng.randrange(len(lines))
        word = rng.choice(rng.choice((SMALL, SMALL, HUGE, ODD)))
        option = rng.choice([index for index, line in enumerate(lines) if re.match(r"\w+=", line)] or [at])
        start = rng.choice([index for index, line in enumerate(lines) if line.startswith("[")] or [at])
        if kind == 0:
            del lines[at]
        elif kind == 1:
            lines.insert(at, lines[rng.randrange(len(lines))])
        elif kind in (2, 3):  # another number
            lines[option] = re.sub(r"(?<=[=,])[^,]*", word, lines[option], count=rng.randint(1, 2))
        elif kind == 4:  # an unknown word
            position = rng.randrange(len(lines[option]) + 1)
            lines[option] = lines[option][:position] + rng.choice("abxyz=[]\x07\u2028") + lines[option][position + 1 :]
        elif kind in (5, 6):  # an option more, in front so that it is the one that counts
            known = SECTION_KEYS.get(lines[start].strip("[]"), SECTION_KEYS["convolutional"])
            lines.insert(start + 1, f"{rng.choice(sorted(known))}={word}")
        elif kind == 7:  # cut off
            lines = "\n".join(lines)[: rng.randrange(1, len("\n".join(lines)) + 1)].split("\n")
        else:  # another kind of layer
            lines[start] = f"[{rng.choice(sorted(SECTION_KEYS))}]"
        lines = lines if any(lines) else ["[net]"]
    return "\n".join(lines)


def run(model: Darknet) -> None:
    """Run one image of the smallest size, or only build shapes if it would take seconds."""
    side = model.max_stride
    largest = max(shape.channels * shape.size((side, side))[0] * shape.size((side, side))[1] for shape in model.shapes)
    device = "cpu" if count_flops(model, (side, side)) < 5e8 and largest < 2e6 else "meta"
    with torch.no_grad():
        maps = model.to(device).eval()(torch.zeros(1, model.in_channels, side, side, device=device))
    for raw, its in zip(maps, model.heads, strict=True):
        assert raw.shape[1:] == (len(its.anchors), side // its.stride, side // its.stride, 5 + its.num_classes)


def test_the_originals_run() -> None:
    for text in dict.fromkeys(ORIGINALS):
        run(Darknet(parse_cfg(text, "original.cfg")))
    assert {section.kind for section in parse_cfg(EVERY_KIND, "x").layers} == SECTION_KEYS.keys()


@pytest.mark.slow
def test_damaged_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections, "MAX_VALUES", 3_000_000)  # near the real limit each would take seconds to draw
    rng = random.Random(0)
    outcomes = {"runs": 0, "refused": 0}
    for case in range(CASES):
        text = damaged(rng.choice(ORIGINALS), rng)
        start = time.process_time()
        try:
            run(Darknet(parse_cfg(text, "fuzz.cfg")))
            outcomes["runs"] += 1
        except ModelError as error:
            message = str(error)
            assert re.match(r"fuzz\.cfg:\d+: ", message) and message.isprintable() and len(message) < 700, (case, text)
            outcomes["refused"] += 1
        except Exception as error:
            pytest.fail(f"case {case}: {type(error).__name__}: {error}\n{text}")
        assert time.process_time() - start < 10, (case, text)  # a bound on hangs, not on speed
    assert min(outcomes.values()) > CASES // 10, outcomes  # the damage is neither too little nor too much


@pytest.mark.parametrize(
    "layers",
    [
        [conv(8, 3, 2), conv(60000, 127)],  # 31 GB of weights
        [conv(8, 3, 2), *["[route]\nlayers=-1,-1\n"] * 40],  # 2^43 channels
        [conv(8, 3, 2), *[section("upsample", stride=2)] * 30],
        [conv(8, 3, 2), *[section("maxpool", size=2, stride=2)] * 30],
        [conv(8, 3, 3), conv(8, 3, 5), conv(8, 3, 7), conv(8, 3, 11), conv(8, 3, 13)],
        [section("avgpool"), *["[route]\nlayers=-1,-1\n"] * 40],
    ],
)
def test_what_no_machine_could_hold_is_refused_before_memory_is_taken(layers: list[str]) -> None:
    with pytest.raises(ModelError, match=r"huge\.cfg:\d+: .*fix: check"):
        Darknet(parse_cfg(cfg(*layers, head(0)), "huge.cfg"))
