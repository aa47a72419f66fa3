"""The report on a data set as text and as one page of HTML, from the data of ``report.json``."""

from __future__ import annotations

import base64
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

COLUMNS = 100  # of a terminal
SHOWN_EXAMPLES = 5  # of each kind in the text; page and json have more
SHOWN_CLASSES = 20  # in the text
MIME_TYPES = {".png": "image/png", ".jpg": "image/jpeg"}


def text_report(report: dict[str, Any]) -> list[str]:
    """The report as lines of at most 100 columns; the last line is ``verdict``."""
    lines = [*_wrapped(f"{report['data']}: {report['root']}"), *_wrapped(_network_line(report)), ""]
    lines += _table(["", *report["splits"]], _rows(report))
    rows = _class_rows(report)
    lines += ["", *_table(_class_titles(report), rows[:SHOWN_CLASSES])]
    if len(rows) > SHOWN_CLASSES:
        lines.append(f"... and {len(rows) - SHOWN_CLASSES} more classes")
    for title in ("notes", "problems"):
        if report[title]:
            lines += ["", f"{title}:"]
        for entry in report[title]:
            lines.append(f"  {entry['split']}: {entry['kind']} ({entry['count']:,})")
            for example in entry["examples"][:SHOWN_EXAMPLES]:
                lines += _wrapped(example, "    ")
            more = entry["count"] - min(len(entry["examples"]), SHOWN_EXAMPLES)
            # One sentence may be about all boxes.
            if more and len(entry["examples"]) > 1:
                lines.append(f"    ... and {more:,} more")
    return [*lines, "", verdict(report)]


def verdict(report: dict[str, Any]) -> str:
    """The number of problems in one line."""
    count = report["num_problems"]
    return f"{count:,} problem{'' if count == 1 else 's'} in {report['num_images']:,} images"


def html_report(report: dict[str, Any], pictures: Sequence[tuple[str, Path]]) -> str:
    """The report as one self-contained page; ``pictures`` are captions with .png or .jpg files."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined
    )
    return environment.get_template("report.html.jinja").render(
        report=report,
        verdict=verdict(report),
        network=_network_line(report),
        figures=(["", *report["splits"]], _rows(report)),
        classes=(_class_titles(report), _class_rows(report)),
        pictures=[(caption, _data_url(path)) for caption, path in pictures],
    )


def _data_url(path: Path) -> str:
    return f"data:{MIME_TYPES[path.suffix]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _network_line(report: dict[str, Any]) -> str:
    network = report["network"]
    strides = ", ".join(map(str, network["strides"]))
    anchors = "  ".join(f"{width:g},{height:g}" for width, height in network["anchors"])
    return f"{network['name']} at {network['image_size']} pixels: strides {strides}, anchors {anchors}"


def _rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each figure, a column for each set."""
    network = report["network"]
    rows: list[tuple[str, Callable[[dict[str, Any]], str]]] = [
        ("images", lambda part: _number(part["images"])),
        ("boxes", lambda part: _number(part["boxes"])),
        ("crowds", lambda part: _number(part["crowds"])),
        ("images without boxes", lambda part: _number(part["empty_images"])),
        ("boxes per image: mean, median, most", lambda part: _spread(part["boxes_per_image"], "mean median most")),
        ("image width: least, median, most", lambda part: _spread(part["image_width"])),
        ("image height: least, median, most", lambda part: _spread(part["image_height"])),
        ("image width / height: 5 %, 50 %, 95 %", lambda part: _spread(part["image_aspect"], "p05 median p95")),
        ("box width in the network: 5 %, 50 %, 95 %", lambda part: _spread(part["box_width"], "p05 median p95")),
        ("box height in the network: 5 %, 50 %, 95 %", lambda part: _spread(part["box_height"], "p05 median p95")),
        ("box width / height: 5 %, 50 %, 95 %", lambda part: _spread(part["box_aspect"], "p05 median p95")),
        *((f"boxes smaller than stride {stride}", _below(str(stride))) for stride in sorted(network["strides"])),
        (f"recall of the anchors at IoU {network['min_iou']:g}", lambda part: _number(part["recall"])),
        ("mean best IoU with an anchor", lambda part: _number(part["mean_best_iou"])),
    ]
    return [[label, *(cell(part) for part in report["splits"].values())] for label, cell in rows]


def _below(stride: str) -> Callable[[dict[str, Any]], str]:
    def cell(part: dict[str, Any]) -> str:
        share = part["longer_side_below_stride"][stride]
        return "-" if share is None else f"{share:.2%}"

    return cell


def _class_titles(report: dict[str, Any]) -> list[str]:
    return ["class", *(f"{split} {what}" for split in report["splits"] for what in ("boxes", "images", "recall"))]


def _class_rows(report: dict[str, Any]) -> list[list[str]]:
    """A row for each class, most boxes first; blank where a set does not have the class."""
    by_split = [{item["name"]: item for item in part["classes"]} for part in report["splits"].values()]
    names = list(dict.fromkeys(name for classes in by_split for name in classes))
    names.sort(key=lambda name: -sum(classes[name]["boxes"] for classes in by_split if name in classes))
    keys = ("boxes", "images", "recall")
    return [[name, *(_number(item.get(name, {}).get(key)) for item in by_split for key in keys)] for name in names]


def _spread(figures: dict[str, Any], keys: str = "least median most") -> str:
    return " ".join(_number(figures[key]) for key in keys.split())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value == int(value) else f"{value:.4g}"


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as needed; the first one is cut where lines would be too long."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    widths[0] = min(widths[0], COLUMNS - sum(widths[1:]) - 2 * len(widths[1:]))
    return [
        "  ".join(
            [row[0][: widths[0]].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        )
        for row in (titles, *rows)
    ]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, COLUMNS, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
