"""``report.html``: one run on one page."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from train_utils.pictures.plots import FOLDER, PLOTS, Plot
from train_utils.report.best import FILE
from train_utils.report.page import duration, figure, write_page
from train_utils.report.run_files import Run, figures_of
from train_utils.scores.coco_eval import FIGURES, PER_CLASS
from train_utils.shell import option

PAGE = "report.html"
TRAIN_BATCH = Plot("First training batch", "What the network was given first, with its boxes.")


def write_report(run: Run, defaults: Mapping[str, Any]) -> Path:
    """Write the report of a run into its folder and return the file.

    ``defaults`` are the values of options by full key without any choice. Raises OSError.
    """
    out = run.folder / PAGE
    best = run.best_row
    last = run.epochs[-1] if run.epochs else None
    scored = [(f"best, epoch {best['epoch']:.0f}", best)] if best is not None else []
    if last is not None and last is not best and "AP" in last:
        scored.append((f"last, epoch {last['epoch']:.0f}", last))
    write_page(
        "report",
        out,
        title=f"{run.config['name']} · {run.folder.name}",
        folder=run.folder,
        facts=facts(run),
        figure_names=FIGURES,
        figures=[(title, figures_of(row)) for title, row in scored],
        class_columns=PER_CLASS,
        classes=run.best().scores.per_class if (run.folder / FILE).is_file() else {},
        pictures=pictures_of(run.folder),
        changed=changed(run.options, defaults),
        sections=sections(run.options, defaults),
        data=run.data,
        starts=run.starts,
        commands=[
            f"python {program} {option('ckpt', run.folder)}{more}"
            for program, more in (("eval.py", ""), ("predict.py", " source=pictures"))
        ],
    )
    return out


def facts(run: Run) -> list[tuple[str, str]]:
    """What one wants to know first, as terms and values."""
    best, planned = run.best_row, run.options["train.epochs"]
    lines = [("best AP", figure(best["AP"])), ("AP50", figure(best["AP50"]))] if best is not None else []
    lines.append(("epochs", f"{len(run.epochs)} of {planned}"))
    if run.times:
        lines.append(("time", duration(sum(row["seconds"] for row in run.times))))
        speed = [row["images_per_second"] for row in run.times if "images_per_second" in row]
        lines += [("images/s", f"{sorted(speed)[len(speed) // 2]:.3g}")] if speed else []
    if run.starts:
        lines += [("device", run.starts[-1]["device"]), ("processes", run.starts[-1]["processes"])]
    return lines


def pictures_of(folder: Path) -> list[tuple[str, str, Path]]:
    """Title, caption and file of each picture of a run that is there."""
    known = {folder / FOLDER / name: plot for name, plot in PLOTS.items()} | {folder / "train_batch.jpg": TRAIN_BATCH}
    return [(*plot, path) for path, plot in known.items() if path.is_file()]


def changed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Key, value and default of the options that differ; a dash where there is no default."""
    keys = [key for key, value in options.items() if key not in defaults or defaults[key] != value]
    return [(key, shown(options[key]), shown(defaults[key]) if key in defaults else "-") for key in keys]


def sections(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, list[tuple[str, str, bool]]]:
    """All options by their section: key, value, and whether it differs from the default."""
    found: dict[str, list[tuple[str, str, bool]]] = {}
    for key, value in options.items():
        section = key.partition(".")[0] if "." in key else ""
        found.setdefault(section, []).append((key, shown(value), key not in defaults or defaults[key] != value))
    return found


def shown(value: Any) -> str:
    """A value as YAML and the command line write it."""
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else str(value)
