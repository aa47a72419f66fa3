"""``report.html``: one run on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from train_utils.pictures.plots import FOLDER, PLOTS
from train_utils.report.best import FILE, read_best
from train_utils.report.page import data_url, figure, shown, write_page
from train_utils.report.run_files import Run
from train_utils.scores.coco_eval import FIGURES, PER_CLASS
from train_utils.terminal import duration

TRAIN_BATCH = "The first training batch, as the network gets it, with its boxes"


def write_report(run: Run, out: Path, defaults: Mapping[str, Any]) -> Path:
    """Write the report of a run to ``out`` and return that.

    ``defaults`` are the values of options by full key without any choice. Raises
    TrainError if it cannot be written, or if the run's detections are damaged.
    """
    options = run.options
    pictures = {run.folder / FOLDER / name: title for name, title in PLOTS.items()}
    pictures[run.folder / "train_batch.jpg"] = TRAIN_BATCH
    classes = read_best(run.folder).scores.per_class if (run.folder / FILE).is_file() else {}
    changed = {key for key, value in options.items() if defaults.get(key, ...) != value}
    write_page(
        "report",
        out,
        title=f"{options['name']} · {run.folder.name}",
        folder=run.folder,
        facts=facts(run),
        figure_names=FIGURES,
        figures=[figure(run.best[name]) for name in FIGURES] if run.best else [],
        class_titles=("class", "images", "boxes", *PER_CLASS),
        classes=[
            (name, *(f"{row[key]:,.0f}" for key in ("images", "boxes")), *(figure(row[key]) for key in PER_CLASS))
            for name, row in classes.items()
        ],
        pictures=[(text, data_url(path.read_bytes(), path.name)) for path, text in pictures.items() if path.is_file()],
        changed=[(key, shown(options[key]), shown(defaults.get(key, "-"))) for key in options if key in changed],
        unchanged=[(key, shown(value)) for key, value in options.items() if key not in changed],
    )
    return out


def facts(run: Run) -> list[tuple[str, Any]]:
    """What one wants to know first, as terms and values."""
    lines: list[tuple[str, Any]] = []
    if run.best:
        lines += [("best AP", figure(run.best["AP"])), ("AP50", figure(run.best["AP50"]))]
    lines.append(("epochs", f"{len(run.epochs)} of {run.options['train.epochs']}"))
    if run.times:
        lines.append(("time", duration(sum(row["seconds"] for row in run.times))))
    if speeds := [row["images_per_second"] for row in run.times if "images_per_second" in row]:
        lines.append(("images/s", f"{median(speeds):.3g}"))
    return lines
