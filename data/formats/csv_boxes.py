"""Read boxes from CSV files with the usual headers.

Known are the tables of torchvision's and keras-retinanet's tutorials, TensorFlow's object
detection, Open Images, Kaggle (a column ``bbox``) and the VGG Image Annotator, and any other
combination of their columns.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from data.errors import DataError, shown

# Names of columns: lower case, letters and digits only.
IMAGE = "filename imageid imagename imagepath filepath image path file img imgpath imgid".split()
CLASS = "class classname label labelname category categoryname name classid categoryid".split()
CORNERS = [
    "xmin x1 left bboxxmin roix1 xtl bboxx1".split(), "ymin y1 top bboxymin roiy1 ytl bboxy1".split(),
    "xmax x2 right bboxxmax roix2 xbr bboxx2".split(), "ymax y2 bottom bboxymax roiy2 ybr bboxy2".split(),
]  # fmt: skip
SIDES = [["x", "bboxx"], ["y", "bboxy"], ["w", "bboxwidth", "bboxw", "width"], ["h", "bboxheight", "bboxh", "height"]]
SIZE = ["imageheight imgheight height".split(), "imagewidth imgwidth width".split()]
BOX, SHAPE, ATTRIBUTES, GROUP = ["bbox", "box", "boundingbox"], "regionshapeattributes", "regionattributes", "isgroupof"
RETINANET = ["path", "x1", "y1", "x2", "y2", "class"]  # the columns of a file without a header
NO_CLASS = "object"
KNOWN = "an image (filename, image_id, path), a class, and xmin,ymin,xmax,ymax or x,y,w,h or bbox"


@dataclass(frozen=True)
class Row:
    """One line: an image, and maybe an object."""

    number: int  # of the line, from 1
    image: str
    class_name: str | None = None
    xywh: tuple[float, float, float, float] | None = None  # None: no object
    crowd: bool = False
    size: tuple[int, int] | None = None  # height, width of the image, if given


def read_csv(path: Path, corners_in_bbox: bool = False) -> list[Row]:
    """Read the rows of a file.

    ``corners_in_bbox``: a column bbox holds x1, y1, x2, y2 instead of x, y, width, height. Boxes
    are in pixels, or in fractions of the image where all of them lie within 0..1. Raises
    ``DataError`` naming the first row that cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise DataError(f"csv={path} cannot be read ({error.strerror}). fix: name a CSV file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"csv={path} is not text in UTF-8. fix: save it as CSV in UTF-8") from error
    lines = text.splitlines(keepends=True)
    first = next((line for line in lines if line.strip()), "")
    delimiter = max(",;\t|", key=first.count)
    if delimiter not in first:
        raise DataError(f"csv={path} has no columns in its first line. fix: name a CSV file with {KNOWN}")
    table = _numbered(csv.reader(lines, delimiter=delimiter, skipinitialspace=True), path)
    first_row = next(table)
    header = first_row[1]
    columns = {re.sub("[^a-z0-9]", "", name.lower()): at for at, name in reversed(list(enumerate(header)))}
    if len(header) == len(RETINANET) and all(not cell or re.fullmatch(r"-?[0-9.]+", cell) for cell in header[1:5]):
        columns = {name: at for at, name in enumerate(RETINANET)}
        table = chain([first_row], table)
    parser = _Parser(path, columns, corners_in_bbox)
    return [parser.row(number, cells) for number, cells in table]


def _numbered(reader: Any, path: Path) -> Iterator[tuple[int, list[str]]]:
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} is no CSV ({error}). fix: correct the row") from error


class _Parser:
    """Parse rows by the meaning of their columns."""

    def __init__(self, path: Path, columns: dict[str, int], corners_in_bbox: bool) -> None:
        self.path, self.corners_in_bbox = path, corners_in_bbox
        self.num_columns = max(columns.values()) + 1

        def find(names: list[str]) -> int | None:
            return next((columns[name] for name in names if name in columns), None)

        self.image, self.class_ = find(IMAGE), find(CLASS)
        self.shape, self.attributes, self.group = (columns.get(name) for name in (SHAPE, ATTRIBUTES, GROUP))
        self.box = find(BOX)
        corners, sides = ([find(names) for names in four] for four in (CORNERS, SIDES))
        self.are_corners = None not in corners
        numbers = corners if self.are_corners else sides
        self.numbers = [at for at in numbers if at is not None] if None not in numbers else []
        used = {self.box, *self.numbers}
        self.size = [at for at in map(find, SIZE) if at is not None and at not in used]
        missing = "image" if self.image is None else "box"
        if self.image is None or (not self.numbers and self.box is None and self.shape is None):
            there = ", ".join(sorted(columns))
            raise DataError(f"csv={path} has no column of the {missing} among {there}. fix: name columns as in {KNOWN}")

    def row(self, number: int, cells: list[str]) -> Row:
        """Parse one line."""
        if len(cells) < self.num_columns:
            raise self._error(number, f"has {len(cells)} columns instead of {self.num_columns}")
        assert self.image is not None
        image = cells[self.image].replace("\\", "/")
        if not image:
            raise self._error(number, "names no image")
        xywh = self._xywh(number, cells)
        if xywh is None:
            return Row(number, image)
        if not all(map(math.isfinite, xywh)):
            raise self._error(number, "has a box that is not finite")
        if xywh[2] <= 0 or xywh[3] <= 0:
            raise self._error(number, f"has a box without area, {xywh[2]:g} x {xywh[3]:g}")
        crowd = self.group is not None and cells[self.group] == "1"
        return Row(number, image, self._class_name(number, cells), xywh, crowd, self._size(number, cells))

    def _size(self, number: int, cells: list[str]) -> tuple[int, int] | None:
        texts = [cells[at] for at in self.size]
        if len(texts) < 2 or not any(texts):
            return None
        try:
            height, width = (round(float(text)) for text in texts)
        except ValueError as error:
            raise self._error(number, f"has an image of {shown(texts[1])} x {shown(texts[0])} pixels") from error
        return height, width

    def _xywh(self, number: int, cells: list[str]) -> tuple[float, float, float, float] | None:
        corners = self.are_corners
        if self.shape is not None:
            return self._via(number, self._json(number, cells[self.shape]))
        if self.numbers:
            texts = [cells[at] for at in self.numbers]
        else:
            assert self.box is not None
            texts, corners = re.split(r"[,\s]+", cells[self.box].strip("[]() ")), self.corners_in_bbox
        if not any(texts):
            return None
        try:
            left, top, third, fourth = map(float, texts)
        except ValueError as error:
            raise self._error(number, f"has the box {shown(','.join(texts))} instead of four numbers") from error
        return (left, top, third - left, fourth - top) if corners else (left, top, third, fourth)

    def _class_name(self, number: int, cells: list[str]) -> str:
        if self.attributes is not None:
            values = list(self._json(number, cells[self.attributes]).values())
            chosen = values[0] if values else NO_CLASS
            if isinstance(chosen, dict):  # check boxes: {"cat": true}
                chosen = next((name for name, is_on in chosen.items() if is_on), NO_CLASS)
            return str(chosen).strip() or NO_CLASS
        if self.class_ is None:
            return NO_CLASS
        if not cells[self.class_]:
            raise self._error(number, "has a box and no class")
        return cells[self.class_]

    def _json(self, number: int, text: str) -> dict[str, Any]:
        try:
            value = json.loads(text or "{}")
        except ValueError as error:
            raise self._error(number, f"holds {shown(text)} instead of JSON") from error
        if not isinstance(value, dict):
            raise self._error(number, f"holds {shown(text)} instead of a JSON object")
        return value

    def _via(self, number: int, shape: dict[str, Any]) -> tuple[float, float, float, float] | None:
        """The box around a region of the VGG Image Annotator."""
        if not shape:
            return None
        try:
            if "all_points_x" in shape:
                xs, ys = ([float(v) for v in shape[f"all_points_{axis}"]] for axis in "xy")
                return min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
            if "cx" in shape and ("r" in shape or "rx" in shape):
                rx, ry = (float(shape["r"] if "r" in shape else shape[key]) for key in ("rx", "ry"))
                return float(shape["cx"]) - rx, float(shape["cy"]) - ry, 2 * rx, 2 * ry
            return float(shape["x"]), float(shape["y"]), float(shape["width"]), float(shape["height"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._error(number, f"has the region {shown(shape)}, which has no box") from error

    def _error(self, number: int, problem: str) -> DataError:
        return DataError(f"{self.path}:{number} {problem}. fix: correct the row")
