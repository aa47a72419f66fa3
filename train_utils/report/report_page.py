"""Write report.html of a run; write and read the evaluation of its best epoch."""

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import msgspec
import numpy as np

from conf import TrainError, compose, first_line
from conf.cli import run_files
from conf.options import flat, option
from conf.schema import TrainConfig
from data.errors import as_started, printable
from train_utils import results
from train_utils.coco_eval import METRICS, OPERATING_POINT, PER_CLASS, Evaluation, format_metric, rows_of_classes
from train_utils.report import plots

BEST_DETECTIONS = "best_detections.npz"


def _numbers(*names: str) -> Any:
    return msgspec.defstruct("Numbers", [(name, float) for name in names])


OF_A_CLASS: Any = _numbers(*PER_CLASS, *OPERATING_POINT, "images", "boxes")
SCORES = msgspec.defstruct(
    "Scores",
    [
        ("metrics", _numbers(*METRICS)),
        ("per_class", dict[str, OF_A_CLASS]),
        ("at_best_f1", _numbers(*OPERATING_POINT)),
        ("scorer", str),
        ("about", dict[str, Any], {}),
    ],
)


def keep_best(folder: Path, best: Evaluation) -> None:
    """Write ``best_detections.npz`` whole or not at all. Raises OSError."""
    scored = {"metrics": best.metrics, "per_class": best.per_class, "at_best_f1": best.at_best_f1}
    scores = json.dumps({**scored, "scorer": best.scorer, "about": dict(best.about)})
    with run_files.whole_file(folder / BEST_DETECTIONS, "wb") as file:
        np.savez(file, scores=scores, detections=best.detections, **vars(best.truth))


def read_best(folder: Path) -> Evaluation:
    """Read what ``keep_best`` wrote. Raises TrainError if it is absent or damaged."""
    path = folder / BEST_DETECTIONS
    again = f"{as_started('python eval.py')} {option('ckpt', folder)} {option('out', folder)}"
    if not path.is_file():
        raise TrainError(f"{folder} has no {BEST_DETECTIONS}: it was not evaluated", again)
    try:
        with np.load(path) as file:
            arrays = dict(file)
        scores = json.loads(str(arrays.pop("scores")))
        msgspec.convert(scores, SCORES)
        found = arrays.pop("detections")
        names = arrays.pop("names").tolist()
        files = list(map(os.fsdecode, arrays.pop("file_names", ())))  # older files have bytes, or none
        truth = results.GroundTruth(**arrays, names=names, file_names=files)
        check_arrays(truth, found)
        return Evaluation(**scores, truth=truth, detections=found, losses={})
    except Exception as error:  # damaged bytes raise any
        raise TrainError(f"{path} is damaged ({first_line(error)})", again) from error


def check_arrays(truth: results.GroundTruth, found: results.Detections) -> None:
    """Raise ValueError unless these may be scored."""
    images, boxes = len(truth.image_ids), len(truth.classes)
    classes = range(len(truth.names))
    shapes = {"image_ids": (images,), "sizes": (images, 2), "offsets": (images + 1,), "boxes_xywh": (boxes, 4)}
    shapes |= dict.fromkeys(("classes", "crowd", "areas"), (boxes,))
    for key, shape in shapes.items():
        column = getattr(truth, key)
        if column.shape != shape or column.dtype.kind not in "biuf":
            raise ValueError(f"{key} of another shape")
    if found.dtype not in (results.DETECTION, results.DETECTION_AS_READ) or found.ndim != 1:
        raise ValueError("detections of another shape")
    known = (
        np.isin(truth.classes, classes),
        np.isin(found["class"], classes),
        np.isin(found["image_id"], truth.image_ids),
    )
    if not np.concatenate(known).all() or len(truth.image_of_box) != boxes or len(truth.file_names) not in (0, images):
        raise ValueError("objects or names of an unknown class or image")


PICTURES = {f"{plots.FOLDER}/{name}": title for name, title in plots.PLOTS.items()}  # titles by path
OF_BEST = list(PICTURES)[1:]  # all but the curves
PICTURES["train_batch.jpg"] = "The first training batch as the network sees it, with its boxes"
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; } figure, table { margin: 1rem 0; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
section { overflow-x: auto; } th, td { padding-right: .9rem; text-align: left; } img { max-width: 100%; }
iframe { border: 0; width: 100%; height: 40rem; }
</style>
<h1>$title</h1>
<p>$folder</p>
<h2>Metrics of the best epoch</h2>
<section id="metrics">$metrics</section>
<h2>Pictures</h2>
$pictures
<h2>Mistakes</h2>
$mistakes
<h2>Options that differ from the defaults</h2>
<section id="options">$changed
<details><summary>All other options, as by default</summary>$unchanged</details></section>
""")


def write_report(folder: Path) -> Path:
    """Write the report of a run, which may be unfinished, into its folder; return its path.

    Raises TrainError if the run's options or detections are damaged, and OSError.
    """
    options = texts_of(run_files.read_config(folder, ""))
    defaults = texts_of(compose.defaults("train", TrainConfig))
    defaults["name"] = options["data.name"]  # of the defaults, only the name stands for another option
    metrics, of_epoch = "<p>No epoch was evaluated yet.</p>", ""
    pictures = ""
    if (folder / BEST_DETECTIONS).is_file():
        best = read_best(folder)
        about = texts_of(best.about)
        cells = map(format_metric, map(best.metrics.get, METRICS))
        metrics = html_table(METRICS, [list(cells)]) + html_table(*rows_of_classes(best))
        metrics += f"<p>{escape(', '.join(map('='.join, about.items())))}</p>"
        if "epoch" in about:
            of_epoch = f" (epoch {escape(about['epoch'])})"
    for name, title in PICTURES.items():
        path = folder / name
        if path.is_file():
            caption = title + of_epoch if name in OF_BEST else title
            kind = "png" if path.suffix == ".png" else "jpeg"
            source = f"data:image/{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"
            pictures += f'<figure><img alt="{title}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    path, listed = folder / plots.FOLDER / "mistakes.html", "<p>None were listed.</p>"
    if path.is_file():  # in a sandbox: a page of somebody else's run may hold a script
        text = escape(path.read_text("utf-8", "replace"))
        listed = f'<iframe title="Mistakes" sandbox="allow-scripts" srcdoc="{text}"></iframe>'
    changed, unchanged = [], []
    for key, text in options.items():
        default = defaults.get(key, "-")
        if text == default:
            unchanged.append((key, text))
        else:
            changed.append((key, text, default))
    page = PAGE.substitute(
        title=escape(f"{options['name']} · {printable(folder.name)}"),
        folder=escape(printable(str(folder))),
        metrics=metrics,
        pictures=pictures,
        mistakes=listed,
        changed=html_table(["option", "value", "default"], changed),
        unchanged=html_table(["option", "value"], unchanged),
    )
    with run_files.whole_file(folder / "report.html") as file:
        file.write(page)
    return folder / "report.html"


def html_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """An HTML table of ``titles`` and escaped cells."""
    text = f"<table>\n<tr><th>{'</th><th>'.join(titles)}</th></tr>\n"
    for row in rows:
        text += f"<tr><td>{'</td><td>'.join(map(escape, map(printable, row)))}</td></tr>\n"
    return f"{text}</table>\n"


def texts_of(options: Mapping[str, Any]) -> dict[str, str]:
    """Values by full key, as the command line writes them."""
    values = flat(options).items()
    return {key: printable(value) if isinstance(value, str) else json.dumps(value) for key, value in values}
