"""``report.html``: one run on one page, with its pictures; nothing is loaded from anywhere."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from mimetypes import guess_type
from pathlib import Path
from statistics import median
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from train_utils.pictures.plots import FOLDER, PLOTS
from train_utils.report.best import FILE, read_best
from train_utils.report.run_files import Run
from train_utils.run.whole_files import whole_file
from train_utils.scores.coco_eval import FIGURES, PER_CLASS, format_figure
from train_utils.terminal import duration

TRAIN_BATCH = "The first training batch, as the network gets it, with its boxes"


def write_report(run: Run, defaults: Mapping[str, Any]) -> Path:
    """Write the report into the folder of a run and return its path.

    ``defaults`` are the values of options by full key without any choice. Raises TrainError if the
    run's detections are damaged, and OSError.
    """
    options, out = run.options, run.folder / "report.html"
    pictures = {run.folder / FOLDER / name: title for name, title in PLOTS.items()}
    pictures[run.folder / "train_batch.jpg"] = TRAIN_BATCH
    classes = read_best(run.folder).scores.per_class if (run.folder / FILE).is_file() else {}
    changed = {key for key, value in options.items() if defaults.get(key, ...) != value}
    environment = Environment(
        loader=PackageLoader("train_utils.report", "."), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    text = environment.get_template("report.html.jinja").render(
        title=f"{options['name']} · {run.folder.name}",
        folder=run.folder,
        facts=facts(run),
        figure_names=FIGURES,
        figures=[format_figure(run.best[name]) for name in FIGURES] if run.best else [],
        class_titles=("class", "images", "boxes", *PER_CLASS),
        classes=[
            (name, f"{row['images']:,.0f}", f"{row['boxes']:,.0f}", *(format_figure(row[key]) for key in PER_CLASS))
            for name, row in classes.items()
        ],
        pictures=[(text, _data_url(path)) for path, text in pictures.items() if path.is_file()],
        changed=[(key, _shown(options[key]), _shown(defaults.get(key, "-"))) for key in options if key in changed],
        unchanged=[(key, _shown(value)) for key, value in options.items() if key not in changed],
    )
    with whole_file(out) as file:
        file.write(text)
    return out


def facts(run: Run) -> list[tuple[str, str]]:
    """What one wants to know first, as terms and values."""
    lines = [("epochs", f"{len(run.epochs)} of {run.options['train.epochs']}")]
    if run.best:
        lines = [("best AP", format_figure(run.best["AP"])), ("AP50", format_figure(run.best["AP50"])), *lines]
    if run.times:
        lines.append(("time", duration(sum(row["seconds"] for row in run.times))))
        lines.append(("images/s", f"{median(row['images_per_second'] for row in run.times):.3g}"))
    return lines


def _data_url(path: Path) -> str:
    return f"data:{guess_type(path.name)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"


def _shown(value: Any) -> str:
    """A value of an option as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value)
