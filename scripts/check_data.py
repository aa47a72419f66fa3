"""Check a data set before a training on it costs anything; the data set is only read.

    python -m scripts.check_data data=bccd model=yolov3-tiny image_size=320
    python -m scripts.check_data --config-dir ~/mine data=cats out=report

Prints a report and writes it to a folder: report.txt, labels.jpg (some images with their boxes) and
statistics.png (boxes by class, sizes, places). Test images are checked if there are any, or alone
with split=test. *Problems* are wrong entries. *Notes* may be intended but are worth a look: empty
images, classes without boxes, anchors that fit none. Exit code 0: no problems, 1: some, 2: a wrong
set or option.
"""

if __name__ == "__main__":  # before the imports below: --help and refused options need none of them
    from conf.cli.program import start

    raise SystemExit(start("check_data"))

import hashlib
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

import models
from conf import schema
from conf.cli import run_files
from data import Annotations, DataConfig, DataError, ImageSource, OnError, check_same_classes, images, layouts
from data.anchors import LOW_RECALL, Sizes, fix_of_anchors, network_sizes, objects_per_image, recall, too_small
from data.geometry import ImageSize
from data.index import read_annotations
from data.io import Findings
from data.progress import counted, log, tracked
from data.validate import CUT, REPEATED, SCORED_EMPTY, SCORED_OUTSIDE, TINY_BOXES, UNLIKE
from train_utils import build
from train_utils.report import draw, plots

BOTH = "train and val"
EVERY_SPLIT = "train", "val", "test"
FAULTS = CUT, REPEATED, SCORED_EMPTY, SCORED_OUTSIDE, TINY_BOXES, UNLIKE


@dataclass
class CheckedSet:
    """The result of a check, by split; findings may also concern train and val together."""

    splits: dict[str, Annotations]
    problems: dict[str, Findings]
    notes: dict[str, Findings]
    recall: dict[str, float]  # share of the boxes that an anchor fits; NaN without boxes

    @property
    def num_problems(self) -> int:
        """The number of wrong entries."""
        return sum(sum(findings.counts.values()) for findings in self.problems.values())


def main(config: schema.CheckDataConfig) -> None:
    """Check the data set; exit with code 1 if there are problems."""
    if check(config).num_problems:
        raise SystemExit(1)


def check(config: schema.CheckDataConfig) -> CheckedSet:
    """Check the set, print the report and write it with the sheet."""
    heads = build.build_meta_model(config.model).heads
    anchors = np.concatenate([head.anchors for head in heads])  # some .cfg have more
    out = Path(config.out or f"runs/check_data/{config.data.name}_{time.strftime('%Y-%m-%d_%H-%M-%S')}")
    run_files.refuse_existing(out, "out")
    out.mkdir(parents=True, exist_ok=True)  # before anything is read
    splits = [config.split] if config.split else EVERY_SPLIT
    checked = check_dataset(config.data, config.image_size, anchors, config.min_iou, splits)
    sentence = models.warn_of_reach(heads, config.image_size)
    if sentence is not None:
        checked.notes[BOTH].add("boxes that bins cannot reach", [sentence.removeprefix("warning: ")])
    cells = []
    for split, annotations in checked.splits.items():
        step = max(1, len(annotations) // max(1, config.pictures))
        for index in range(0, len(annotations), step)[: config.pictures]:
            classes, boxes = annotations.training_boxes(index)
            with suppress(DataError):  # the report names it
                image = np.asarray(ImageSource(annotations, OnError.stop).read(index))
                drawn = draw.draw_cell(image, boxes, classes, annotations.names)
                cells.append((drawn, f"{split}: {annotations.file_name(index)}"))
    if cells:
        draw.save_sheet(cells, out / "labels.jpg")
        plots.save_plot(out / "statistics.png", log.info, plots.draw_labels, checked.splits)
    lines = [f"{config.data.name}: {config.data.root}", *text_report(checked)]
    (out / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8", errors="backslashreplace")
    log.info("\n".join(lines[:-1]))
    log.info(f"{lines[-1]}, report: {out / 'report.txt'}")
    return checked


def check_dataset(
    config: DataConfig, image_size: ImageSize, anchors: Sizes, min_iou: float, splits: Sequence[str] = EVERY_SPLIT
) -> CheckedSet:
    """Read all labels and decode all images of ``splits``; of EVERY_SPLIT the tests may be missing.

    ``anchors`` (k, 2) are those of the network at ``image_size`` pixels; it learns the boxes that
    overlap one by more than ``min_iou``. Raises ``DataError`` if a whole set is missing or broken.
    """
    checked = CheckedSet({}, defaultdict(Findings), defaultdict(Findings), {})
    for split in splits:
        try:
            annotations, problems, changed = read_annotations(config, split)
        except DataError as error:
            if split == splits[0] or split != "test":
                raise
            checked.notes[split].add("not checked", [error.sentence])
            break
        checked.splits[split], checked.problems[split] = annotations, problems
        notes = checked.notes[split]
        for kind, count in changed.counts.items():
            (problems if kind.startswith(FAULTS) else notes).add(kind, changed.examples[kind], count)
        empty = np.flatnonzero(objects_per_image(annotations) == 0)
        notes.add("images without boxes", empty, describe=annotations.path)
        with suppress(DataError):  # of which _check_images says more
            for kind, paths in ImageSource(annotations, OnError.stop).read_sample().items():
                notes.add(kind, paths)
        absent = np.setdiff1d(np.arange(len(annotations.names)), annotations.classes)
        notes.add("classes without boxes", absent, describe=annotations.names.__getitem__)
        sizes = network_sizes(annotations, image_size)
        notes.add("boxes too small to learn", sizes[too_small(sizes)], describe="{0[0]:.1f} x {0[1]:.1f} px".format)
        reached = checked.recall[split] = recall(sizes, anchors, min_iou)
        if reached < LOW_RECALL:
            says = f"{1 - reached:.1%} of the boxes overlap no anchor by more than {min_iou:g}"
            example = f"{says}. Try {fix_of_anchors(reached, min_iou)}"
            notes.add("boxes that no anchor fits", [example], round((1 - reached) * len(sizes)))
        try:
            check_same_classes(checked.splits[splits[0]], annotations)
        except DataError as error:
            checked.problems[f"train and {split}"].add("classes that differ", [error.sentence])
    if not schema.is_installed("simplejpeg"):
        checked.notes[BOTH].add("checks left out", ["JPEG files are not checked inside: uv pip install simplejpeg"])
    _check_images(checked)
    return checked


def _check_images(checked: CheckedSet) -> None:
    first: dict[bytes, tuple[str, int]] = {}  # split and position, by the hash of its pixels
    for split, annotations in checked.splits.items():
        problems, source = checked.problems[split], ImageSource(annotations, OnError.stop)
        with ThreadPoolExecutor(source.readers) as pool:
            hashes = pool.map(partial(_pixel_hash, source), range(len(annotations)))
            for index, (result, damage) in enumerate(tracked(hashes, len(annotations), f"decoding {split}")):
                if isinstance(result, str):
                    problems.add("images that cannot be read", [result])
                    continue
                if damage is not None:
                    problems.add("images that are damaged inside", [f"{annotations.path(index)}: {damage}"])
                other, number = first.setdefault(result, (split, index))
                pair = f"{checked.splits[other].path(number)} and {annotations.path(index)}"
                if other != split:
                    checked.problems[f"{other} and {split}"].add("images in both sets", [pair])
                elif number != index:
                    problems.add("repeated images", [pair])


def _pixel_hash(source: ImageSource, index: int) -> tuple[bytes | str, str | None]:
    """The hash of an image's size and pixels, or why it is unreadable; and damage inside a JPEG."""
    try:
        image = np.asarray(source.read(index))
    except DataError as error:
        return error.sentence, None
    damage = images.jpeg_damage(layouts.read_file(source.annotations.path(index)))
    return hashlib.blake2b(image.tobytes(), key=b"%d x %d" % image.shape[:2]).digest(), damage


def text_report(checked: CheckedSet) -> list[str]:
    """Lines of a report: metrics, classes, notes and problems; the last line is the verdict."""
    lines = []
    boxes = defaultdict[str, Counter[str]](Counter)  # of each class in each set
    for split, annotations in checked.splits.items():
        size = f"{counted(len(annotations), 'image')}, {counted(len(annotations.classes), 'box')}"
        lines.append(f"{split}: {size}, recall of the anchors {checked.recall[split]:.4f}")
        numbers = np.bincount(annotations.classes, minlength=len(annotations.names))
        for name, number in zip(annotations.names, numbers.tolist(), strict=True):
            boxes[name][split] = number
    width = max(map(len, ["class", *boxes]))
    lines += ["", f"{'class':{width}}" + "".join(f"{split + ' boxes':>13}" for split in checked.splits)]
    for name, of_split in sorted(boxes.items(), key=lambda row: -row[1].total()):
        lines.append(f"{name:{width}}" + "".join(f"{of_split[split]:>13,}" for split in checked.splits))
    for title, by_split in (("notes", checked.notes), ("problems", checked.problems)):
        if any(findings.counts for findings in by_split.values()):
            lines += ["", f"{title}:"]
        for split, findings in by_split.items():
            for kind, count in findings.counts.items():
                examples = findings.examples[kind]
                lines += [f"  {split}: {kind} ({count:,})", *(f"    {example}" for example in examples)]
                if 1 < len(examples) < count:
                    lines.append(f"    ... and {count - len(examples):,} more")
    number = sum(map(len, checked.splits.values()))
    return [*lines, "", f"{counted(checked.num_problems, 'problem')} in {counted(number, 'image')}"]
