"""The worst mistakes of an evaluation: a list, a sheet of pictures, and a part of report.html.

The kinds, and what AP50 would gain without one, are those of TIDE (Bolya et al., "TIDE: A General
Toolbox for Identifying Object Detection Errors", ECCV 2020), from the matches that AP50 comes from.
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
from pycocotools import mask

from conf.cli import run_files
from train_utils import bootstrap, results
from train_utils.coco_eval import Evaluation, Matches, find_matches
from train_utils.report import draw

# In the order of TIDE, whose first condition that holds decides.
KINDS = "badly placed,wrong class,twice,background,class and place,missed,labelled twice".split(",")
PLACE, CLASS, TWICE, BACKGROUND, BOTH, MISSED, LABELS, NONE = range(8)
LEAST, RIGHT = 0.1, 0.5  # IoU, as in TIDE
SAME_OBJECT = 0.8  # IoU from which two labels are of one object
# Okabe and Ito's vermilion for detections and blue for labels, which all readers tell apart.
COLORS = np.array([(213, 94, 0)] * MISSED + [(0, 114, 178)] * 2)
PICTURES, BOXES = 24, 12  # on the sheet, on one of its pictures
ROWS = 20_000  # in the report, half of them for their suspicion
COLUMNS = "picture,kind,class,other class,score,IoU,left,top,width,height,cost,suspicion".split(",")
FIELDS = "image kind index other score iou left top width height cost suspicion closest is_mended".split()


def find_mistakes(evaluation: Evaluation, matches: Matches) -> Any:
    """A record for each of n detections of ``matches``, then for each of M labels.

    image: its position in the data set. kind: in KINDS, or NONE. index, other: its class, and that
    of what it is compared with, -1 for nothing. score: of a label the best one of those that find
    it, or would if they were mended. is_mended: a detection that, of another class or place, would
    find a label that none finds, or that label. suspicion: 0 to 1, that the labels are wrong.

    cost: the part of what the mean precision at the labels' detections (0 without one) lacks to 1.
    Of k detections each false one takes 1 / k. A label and what would find it count twice.
    """
    truth, count = evaluation.truth, len(matches.scores)
    is_right = matches.right[0]
    image = np.append(np.argsort(truth.image_ids)[matches.images], truth.image_of_box)
    index = np.append(matches.classes, truth.classes)
    score = np.append(matches.scores, np.zeros(len(truth.classes)))
    boxes = np.concatenate(
        [results.canonical_order(evaluation.detections)["box_xywh"][matches.found], truth.boxes_xywh]
    )
    counted = np.append(is_right | matches.wrong[0], ~truth.crowd.astype(bool))
    rows = np.arange(len(index))
    is_found = np.isin(rows, count + matches.labels[is_right])
    kind, closest = np.where(counted, BACKGROUND, NONE), 0 * rows
    iou = 0 * score
    order = np.lexsort((index, rows >= count, image))  # of labels that share a box TIDE takes the first class
    order = order[counted[order]]
    for own in np.split(order, np.flatnonzero(np.diff(image[order])) + 1):
        labels = own[own >= count]
        if len(labels) == 0:
            continue
        overlaps = mask.iou(boxes[own], boxes[labels], np.zeros(len(labels)))
        twins = np.tril(overlaps[-len(labels) :], -1)
        overlaps[-len(labels) :] = twins * (twins >= SAME_OBJECT)
        same = overlaps * (index[own, None] == index[labels])
        in_place, other = same.max(1), overlaps - same
        is_place = (in_place >= LEAST) & (in_place <= RIGHT)
        is_twice = (same * is_found[labels]).max(1) >= RIGHT
        is_class, is_far = other.max(1) >= RIGHT, overlaps.max(1) <= LEAST
        kind[own] = np.argmax([is_place, is_class, is_twice, is_far, np.ones(len(own))], 0)
        near = np.choose(kind[own].clip(max=TWICE)[:, None], [same, other, overlaps])
        closest[own], iou[own] = labels[near.argmax(1)], near.max(1)
        is_alone = iou[labels] == 0  # of others the closest is an earlier label
        kind[labels] = np.where(is_alone, MISSED, LABELS)
        alone, to_alone = labels[is_alone], overlaps[:, is_alone]
        closest[alone], iou[alone] = own[to_alone.argmax(0)], to_alone.max(0)
    kind[:count][is_right] = NONE
    closest[:count][is_right] = count + matches.labels[is_right]
    order = np.argsort(-matches.scores, kind="stable")
    finds = order[(kind[order] <= CLASS) | is_right[order]]
    np.maximum.at(score, closest[finds], score[finds])
    finds = finds[~is_found[closest[finds]]]
    mends = finds[np.unique(closest[finds], return_index=True)[1]]
    is_mended = np.isin(rows, [mends, closest[mends]])
    labels = matches.boxes.sum(1)
    part = 1 / labels.clip(1) / max(np.count_nonzero(labels), 1)  # of a label of each class in the mean
    cost = part[index] * ~is_found
    for number, of_label in enumerate(part):
        own = order[index[order] == number]
        lacks = is_right[own] / counted[own].cumsum().clip(1)
        cost[own] = (lacks.sum() - lacks.cumsum()) * of_label
    cost[mends] += cost[closest[mends]]
    # Nothing comes near many a small object.
    suspicion = np.select([kind == BACKGROUND, (kind == MISSED) & (iou < LEAST), kind == LABELS], [score, 0.5, iou])
    columns = [image, kind, index, np.where(iou > 0, index[closest], -1), score, iou, *boxes.T]
    columns += [cost, suspicion, closest, is_mended]
    return np.rec.fromarrays(columns, names=FIELDS)  # type: ignore[call-overload]


def gains(rows: Any, matches: Matches) -> list[tuple[str, int, float]]:
    """TIDE's kinds, their number at any score, and what AP50 would gain if one were mended."""
    count = len(matches.scores)
    found, labels = rows[:count], rows[count:]
    boxes, right = matches.boxes.sum(1, keepdims=True), matches.right[:1]
    wrong = matches.wrong[:1]
    whole = matches._replace(images=0 * matches.images, right=right, wrong=wrong, boxes=boxes)
    once, table = np.ones((1, 1), int), []
    base = bootstrap.resampled_ap(whole, once)[0]
    for number, kind in enumerate(KINDS[:LABELS]):
        is_of = found.kind == number
        is_mended = is_of & found.is_mended
        classes = np.where(is_mended, rows.index[found.closest], found.index)
        mended = whole._replace(classes=classes, right=right | is_mended, wrong=wrong & ~is_of)
        if number == MISSED:
            is_of = (labels.cost > 0) & (labels.kind < NONE) & ~labels.is_mended
            left = boxes - np.bincount(labels.index, is_of, len(boxes))[:, None]
            mended = whole._replace(boxes=np.maximum(left, boxes > 0))  # in TIDE, too, AP is 0 without any
        gain = bootstrap.resampled_ap(mended, once)[0] - base
        table.append((kind, int(is_of.sum()), round(float(gain), 6)))
    return table


def draw_mistakes(
    evaluation: Evaluation, threshold: float, read: Callable[[int], Any], name_of: Callable[[int], str], out: Path
) -> None:
    """Write the sheet ``out`` and mistakes.csv and .html beside it.

    They list detections from a score on, and labels that none of them finds. On the sheet pictures
    of the costliest mistakes and of the most suspicious labels alternate.
    """
    matches = evaluation.matches or find_matches(evaluation.truth, evaluation.detections, evaluation.scorer)
    rows, names = find_mistakes(evaluation, matches), [*evaluation.truth.names, "none"]
    table, is_shown = gains(rows, matches), rows.score >= threshold
    of_kind = [rows.kind < MISSED, rows.kind == MISSED]
    rows = rows[np.select(of_kind, [is_shown, ~is_shown], rows.kind == LABELS)]
    rows = rows[np.argsort(-rows.cost, kind="stable")]
    lines = [COLUMNS]
    for image, kind, index, other, *numbers, _, _ in rows.tolist():
        values = map("{:.6g}".format, numbers)
        lines.append([name_of(image), KINDS[kind], names[index], names[other], *values])
    with run_files.whole_file(out.with_suffix(".csv")) as file:
        csv.writer(file).writerows(lines)
    order = np.stack([np.arange(len(rows)), np.argsort(-rows.suspicion, kind="stable")], 1).ravel()
    listed = [COLUMNS, *(lines[row + 1] for row in np.unique(order[:ROWS]))]
    content = json.dumps([table, listed]).replace("<", "\\u003c")  # no </script>
    out.with_suffix(".html").write_text(PAGE.substitute(count=len(rows), content=content))
    firsts = np.sort(np.unique(rows.image[order], return_index=True)[1])
    cells = []
    for worst in rows[order[firsts[:PICTURES]]]:
        picture = read(worst.image)
        if picture is not None:
            own = rows[rows.image == worst.image]
            own = own[np.argsort(own != worst, kind="stable")][:BOXES]
            boxes = results.to_xyxy(np.column_stack([own.left, own.top, own.width, own.height]))
            why = f"{names[worst.index]} {worst.score:.2f}, near {names[worst.other]} ({worst.iou:.2f})"
            cell = draw.draw_cell(picture, boxes, own.index, names, colors=COLORS[own.kind])
            cells.append((cell, name_of(worst.image), f"{KINDS[worst.kind]}: {why}"))
    if cells:
        draw.save_sheet(cells, out)


PAGE = Template("""<!DOCTYPE html><meta charset="utf-8"><title>Mistakes</title>
<style>:root { color-scheme: light dark; font: 16px/1.5 sans-serif; } td { padding-right: .9rem; }</style>
<p>What AP50 would gain if all mistakes of a kind, at any score, were mended:</p>
<table id="gains"></table>
<p>Mistakes from the score of the best F1 on, the costliest first. All $count are in mistakes.csv.
<label>Kind <select id="kind"><option value="">all<option>labels to look at</select></label>
<label>Class <select id="class"><option value="">all</select></label></p>
<table id="mistakes"></table>
<script>
const find = id => document.getElementById(id), kind = find("kind"), name = find("class");
const [gains, [titles, ...rows]] = $content;
function fill(id, lines) {
  find(id).replaceChildren(...lines.map(line => {
    const row = document.createElement("tr");
    line.forEach(cell => row.insertCell().textContent = cell);
    return row;
  }));
}
function show() {
  const odd = kind.value == "labels to look at";
  const chosen = rows.filter(row => (!kind.value || kind.value == row[1] || odd && row[11] > 0)
    && (!name.value || name.value == row[2]));
  if (odd) chosen.sort((a, b) => b[11] - a[11]);
  fill("mistakes", [titles, ...chosen.slice(0, 200)]);
}
for (const [box, column] of [[kind, 1], [name, 2]])
  for (const value of [...new Set(rows.map(row => row[column]))].sort()) box.add(new Option(value, value));
kind.onchange = name.onchange = show;
fill("gains", [["kind", "boxes", "AP50 would gain"], ...gains]);
show();
</script>
""")
