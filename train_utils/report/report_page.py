"""Write report.html of a run; write and read the evaluation of its best epoch."""

import base64
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from zipfile import BadZipFile

import numpy as np

from conf.cli import run_files
from conf.errors import TrainError
from conf.options import flat, option
from data.errors import as_started, printable
from train_utils import coco_eval, results
from train_utils.report import plots

BEST_DETECTIONS = "best_detections.npz"


def keep_best(folder: Path, best: coco_eval.Evaluation) -> None:
    """Write ``best_detections.npz`` whole or not at all. Raises OSError."""
    scored = {key: getattr(best, key) for key in ("metrics", "per_class", "at_best_f1", "scorer")}
    scores = json.dumps({**scored, "about": dict(best.about)})
    with run_files.whole_file(folder / BEST_DETECTIONS, "wb") as file:
        names = np.array([*map(os.fsencode, best.truth.file_names)], np.bytes_)
        np.savez(file, scores=scores, detections=best.detections, **{**vars(best.truth), "file_names": names})


def read_best(folder: Path) -> coco_eval.Evaluation:
    """Read what ``keep_best`` wrote. Raises TrainError if it is absent or damaged."""
    path = folder / BEST_DETECTIONS
    again = f"fix: {as_started('python eval.py')} {option('ckpt', folder)} {option('out', folder)}"
    if not path.is_file():
        raise TrainError(f"{folder} has no {BEST_DETECTIONS}: it was not evaluated. {again}")
    try:
        with np.load(path) as file:
            arrays = dict(file)
        text, reported, names = map(arrays.pop, ("scores", "detections", "names"))
        files = [os.fsdecode(name) for name in arrays.pop("file_names", ())]
        truth = results.GroundTruth(**arrays, names=names.tolist(), file_names=files)
        images, boxes = (len(truth.image_ids),), (len(truth.classes),)
        shapes = {"sizes": (*images, 2), "offsets": (images[0] + 1,), "boxes_xywh": (*boxes, 4)}
        shapes |= {"image_ids": images, **dict.fromkeys(("classes", "crowd", "areas"), boxes)}
        wrong = [key for key, shape in shapes.items() if arrays[key].shape != shape or arrays[key].dtype.kind in "OSU"]
        of_detections = reported.dtype in (results.DETECTION, results.DETECTION_AS_READ)
        if wrong or not of_detections or len(files) not in (0, *images):
            raise ValueError(f"{', '.join(wrong) or 'detections'} of another shape")
        classes, ids = range(len(names)), truth.image_ids
        known = (truth.classes, classes), (reported["class"], classes), (reported["image_id"], ids)
        if not all(np.isin(found, all_of).all() for found, all_of in known) or len(truth.image_of_box) != boxes[0]:
            raise ValueError("objects of an unknown class or image")
        scores = json.loads(str(text))
        columns = (*coco_eval.PER_CLASS, *coco_eval.OPERATING_POINT, "images", "boxes")
        rows = [(scores["metrics"], coco_eval.METRICS), (scores["at_best_f1"], coco_eval.OPERATING_POINT)]
        rows += [(row, columns) for row in scores["per_class"].values()]
        if not isinstance(scores.get("about", {}), dict):
            raise ValueError("it does not say what was evaluated")
        sum(abs(row[key]) for row, keys in rows for key in keys)  # TypeError if one is not a number
        return coco_eval.Evaluation(**scores, truth=truth, detections=reported, losses={})
    except (OSError, AttributeError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as error:
        raise TrainError(f"{path} is damaged ({error}). {again}") from error


PICTURES = {f"{plots.FOLDER}/{name}": title for name, title in plots.PLOTS.items()}  # titles by path in the run
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
</style>
<h1>$title</h1>
<p>$folder</p>
<h2>Metrics of the best epoch</h2>
<section id="metrics">$metrics</section>
<h2>Pictures</h2>
$pictures
<h2>Options that differ from the defaults</h2>
<section id="options">$changed
<details><summary>All other options, as by default</summary>$unchanged</details></section>
""")


def write_report(folder: Path, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Path:
    """Write the report of a run, which may be unfinished, into its folder; return its path.

    ``options`` are those of the run by full key, ``defaults`` their default values. Raises
    TrainError if the run's detections are damaged, and OSError.
    """
    metrics, of_epoch = "<p>No epoch was evaluated yet.</p>", ""
    if (folder / BEST_DETECTIONS).is_file():
        best = read_best(folder)
        metrics = html_table(list(best.metrics), [list(map(coco_eval.format_metric, best.metrics.values()))])
        metrics += html_table(*coco_eval.rows_of_classes(best))
        about = [f"{key}={_text(value)}" for key, value in flat(best.about).items()]
        metrics += f"<p>{escape(', '.join(about))}</p>"
        of_epoch = f" (epoch {best.about['epoch']})" if "epoch" in best.about else ""
    pictures = ""
    for name, title in PICTURES.items():
        if (folder / name).is_file():
            data = base64.b64encode((folder / name).read_bytes()).decode()
            source = f"data:image/{'png' if name.endswith('.png') else 'jpeg'};base64,{data}"
            caption = title + escape(of_epoch) * (name in OF_BEST)
            pictures += f'<figure><img alt="{title}" src="{source}"><figcaption>{caption}</figcaption></figure>'
    rows_of_options = [(key, _text(value), _text(defaults.get(key, "-"))) for key, value in options.items()]
    text = PAGE.substitute(
        title=escape(printable(f"{options['name']} · {folder.name}")),
        folder=escape(printable(str(folder))),
        metrics=metrics,
        pictures=pictures,
        changed=html_table(["option", "value", "default"], [row for row in rows_of_options if row[1] != row[2]]),
        unchanged=html_table(["option", "value"], [row[:2] for row in rows_of_options if row[1] == row[2]]),
    )
    with run_files.whole_file(folder / "report.html") as file:
        file.write(text)
    return folder / "report.html"


def html_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of ``titles`` and escaped cells."""
    text = f"<table>\n<tr><th>{'</th><th>'.join(titles)}</th></tr>\n"
    for row in rows:
        text += f"<tr>{''.join(f'<td>{escape(printable(str(cell)))}</td>' for cell in row)}</tr>\n"
    return f"{text}</table>\n"


def _text(value: Any) -> str:
    """A value of an option as the command line writes it."""
    return printable(value) if isinstance(value, str) else json.dumps(value)
