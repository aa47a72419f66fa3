"""Runs by their files: the page of one, and how several compare."""

import base64
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any
from zipfile import BadZipFile

import hotcoco
import numpy as np
import yaml

from train_utils.coco_eval import FIGURES, PER_CLASS, Evaluation, format_figure, match
from train_utils.detections import GroundTruth
from train_utils.errors import TrainError
from train_utils.files import whole_file
from train_utils.options import MAY_CHANGE, flat, is_covered, option
from train_utils.plots import FOLDER, PLOTS
from train_utils.progress import Progress

FILE = "best_detections.npz"


def keep_best(folder: Path, best: Evaluation) -> None:
    """Write ``best_detections.npz`` whole or not at all. Raises OSError."""
    temporary = folder / f"{FILE}.tmp"
    with temporary.open("wb") as file:
        scores = json.dumps({"figures": best.figures, "per_class": best.per_class})
        np.savez(file, scores=scores, detections=best.detections, **vars(best.truth))
    os.replace(temporary, folder / FILE)


def read_best(folder: Path) -> Evaluation:
    """Read what ``keep_best`` wrote. Raises TrainError if it is absent or damaged."""
    path = folder / FILE
    again = f"fix: python eval.py {option('ckpt', folder)} {option('out', folder)}"
    if not path.is_file():
        raise TrainError(f"{folder} holds no {FILE}: not evaluated yet. {again}")
    try:
        with np.load(path) as file:
            arrays = dict(file)
        scores, detections, names = (arrays.pop(name) for name in ("scores", "detections", "names"))
        truth = GroundTruth(**arrays, names=names.tolist())
        return Evaluation(**json.loads(str(scores)), truth=truth, detections=detections)
    except (OSError, ValueError, KeyError, TypeError, BadZipFile) as error:
        raise TrainError(f"{path} is damaged ({error}). {again}") from error


def read_options(folder: Path) -> dict[str, Any]:
    """The options of a run by full key, as ``optim.lr``. Raises TrainError if it is none."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise TrainError(f"{folder} is not the folder of a run (no config.yaml). fix: runs/<name>/<date_time>")
    return flat(yaml.safe_load(path.read_text(encoding="utf-8")))


TRAIN_BATCH = "The first training batch, as the network gets it, with its boxes"
PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 70rem; margin: 2rem auto; padding: 0 1rem; }
section { overflow-x: auto; } th, td { padding-right: .9rem; text-align: left; } img { max-width: 100%; }
</style>
<h1>$title</h1>
<p>$folder</p>
<h2>Figures of the best epoch</h2>
<section id="figures">$figures</section>
<h2>Pictures</h2>
$pictures
<h2>Options that differ from the defaults</h2>
<section id="options">$changed
<details><summary>All other options, as by default</summary>$unchanged</details></section>
""")


def write_report(folder: Path, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> Path:
    """Write the report into the folder of a run, also of one that goes on, and return its path.

    ``options`` are those of the run by full key, ``defaults`` their values without any choice.
    Raises TrainError if the run's detections are damaged, and OSError.
    """
    figures = "<p>No epoch was evaluated yet.</p>"
    if (folder / FILE).is_file():
        best = read_best(folder)
        figures = html_table(FIGURES, [[format_figure(best.figures[name]) for name in FIGURES]])
        rows = [
            (name, row["images"], row["boxes"], *(format_figure(row[key]) for key in PER_CLASS))
            for name, row in best.per_class.items()
        ]
        figures += html_table(("class", "images", "boxes", *PER_CLASS), rows)
    pictures = {folder / FOLDER / name: title for name, title in PLOTS.items()}
    pictures[folder / "train_batch.jpg"] = TRAIN_BATCH
    shown = [(key, _text(value), _text(defaults.get(key, "-"))) for key, value in options.items()]
    text = PAGE.substitute(
        title=escape(f"{options['name']} · {folder.name}"),
        folder=escape(str(folder)),
        figures=figures,
        pictures="".join(_figure(path, title) for path, title in pictures.items() if path.is_file()),
        changed=html_table(("option", "value", "default"), [row for row in shown if row[1] != row[2]]),
        unchanged=html_table(("option", "value"), [row[:2] for row in shown if row[1] == row[2]]),
    )
    with whole_file(folder / "report.html") as file:
        file.write(text)
    return folder / "report.html"


def html_table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """An HTML table of escaped cells."""
    head = "".join(f"<th>{escape(title)}</th>" for title in titles)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>\n" for row in rows)
    return f"<table>\n<tr>{head}</tr>\n{body}</table>\n"


def _figure(path: Path, title: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    kind = "png" if path.suffix == ".png" else "jpeg"
    return f'<figure><img alt="{title}" src="data:image/{kind};base64,{data}"><figcaption>{title}</figcaption></figure>'


def _text(value: Any) -> str:
    """A value of an option as the command line writes it."""
    return value if isinstance(value, str) else json.dumps(value)


CONFIDENCE = 0.95  # of the intervals
DRAWS = 200_000  # for the quantiles of a sum of errors
SEED = "train.seed"
COUNTS = {"data.train", "data.val", "evaluate.every", "train.patience"}  # what may change in a run, but counts here
IGNORED = (SEED, "name", *(option for option in MAY_CHANGE if option not in COUNTS))


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed only."""

    letter: str
    setting: dict[str, Any]
    runs: list[Path]
    best: list[Evaluation]  # of each run

    def figures(self, name: str = "AP") -> list[float]:
        """One of the COCO figures of each run's best epoch."""
        return [best.figures[name] for best in self.best]

    def mean(self, name: str = "AP") -> float:
        """The mean of a figure over the runs."""
        return fmean(self.figures(name))

    def spread(self) -> float | None:
        """The standard deviation of AP over the runs (n - 1); None for a single run."""
        return stdev(self.figures()) if len(self.runs) > 1 else None


def read_groups(folders: Sequence[Path]) -> list[Group]:
    """The runs of these folders by setting, in the order in which each setting comes first.

    Raises TrainError if a folder is no run, or has no evaluation or another validation set than the
    first one.
    """
    groups: dict[str, Group] = {}
    truth = None
    for folder in folders:
        options, best = read_options(folder), read_best(folder)
        truth = truth or best.truth
        if not all(map(np.array_equal, vars(truth).values(), vars(best.truth).values())):
            raise TrainError(
                f"{folder} was scored on another validation set than {folders[0]}. fix: score it on the same: "
                "python eval.py ckpt=... data=... out=<its folder>"
            )
        setting = {key: value for key, value in options.items() if not is_covered(key, IGNORED)}
        letter = chr(ord("A") + len(groups))
        group = groups.setdefault(json.dumps(setting, sort_keys=True), Group(letter, setting, [], []))
        group.runs.append(folder)
        group.best.append(best)
    return list(groups.values())


def differences(groups: Sequence[Group]) -> list[tuple[str, list[Any]]]:
    """Each option in which settings differ, with the value of each; "-" where one lacks it."""
    keys = dict.fromkeys(key for group in groups for key in group.setting)
    rows = [(key, [group.setting.get(key, "-") for group in groups]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


@dataclass(frozen=True)
class Gain:
    """The difference of two settings in AP, the second minus the first, with its interval."""

    value: float
    low: float
    high: float
    source: str  # of the error: "images", or "images and seeds"

    @property
    def is_real(self) -> bool:
        """Whether the interval does not hold 0."""
        return self.low > 0 or self.high < 0

    def sentence(self) -> str:
        """The verdict in plain words."""
        word, verdict = "gain" if self.value >= 0 else "loss", "is real" if self.is_real else "is unproven"
        interval = f"{CONFIDENCE:.0%} interval {self.low:+.3f} to {self.high:+.3f} over {self.source}"
        return f"the {word} of {abs(self.value):.3f} AP {verdict}: {interval}"


def gain(first: Group, second: Group, resamples: int, seed: int) -> Gain:
    """Compare two settings that were scored on the same images.

    The error over images is that of a bootstrap, which draws the same images for all runs. hotcoco
    1.3 scores a drawn image once, however often it was drawn. That is a delete-d jackknife, whose
    errors are scaled by the root of the shares kept and left out (Shao and Wu 1989). Where a
    setting has several runs, Student's t with the pooled variance of AP adds the error over seeds.
    """
    value, counts = second.mean() - first.mean(), (len(first.runs), len(second.runs))
    deltas = np.zeros(resamples)
    title = f"{second.letter} against {first.letter}"
    with Progress(max(counts) * resamples, title, enabled=True, unit="draw") as progress:
        for number in range(max(counts)):
            before, after = (group.best[number % len(group.best)] for group in (first, second))
            for draw, delta in enumerate(bootstrap(before, after, resamples, seed)):
                deltas[draw] += delta / max(counts)
                progress.advance(1)
    generator, images = np.random.default_rng(seed), len(first.best[0].truth.image_ids)
    left_out = (1 - 1 / images) ** images or 1.0  # share of the images; of one image none
    values = value + ((1 - left_out) / left_out) ** 0.5 * generator.choice(deltas - deltas.mean(), DRAWS)
    if freedom := sum(counts) - 2:
        squares = sum(np.var(group.figures()) * len(group.runs) for group in (first, second))
        error = (squares / freedom * sum(1 / count for count in counts)) ** 0.5
        values += error * generator.standard_t(freedom, DRAWS)
    low, high = np.quantile(values, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Gain(value, float(low), float(high), "images and seeds" if freedom else "images")


def bootstrap(first: Evaluation, second: Evaluation, resamples: int, seed: int) -> Iterator[float]:
    """The difference in AP on each of so many drawings of the images, the second minus the first.

    The images that hotcoco draws depend on ``seed`` and their number only. One at a time takes
    twice the time of all at once, but shows progress.
    """
    sides = [match(side.truth, side.detections, every_size=False) for side in (first, second)]
    for number in range(resamples):
        drawn: Any = hotcoco.compare(sides[0], sides[1], n_bootstrap=1, seed=seed * resamples + number)
        yield drawn["ci"]["AP"]["lower"]
