"""The files that name the images and classes of a set, and what lies beside the images."""

import codecs
import errno
import json
import mmap
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import yaml

from data import remote
from data.errors import DataError, shown

IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jp2 .jpe .jpeg .jpg .mpo .pbm .pgm .png .pnm .ppm .tif .tiff .webp".split()
)
SET_KINDS = (
    "a data.yaml, Darknet's obj.data, a COCO json, or a folder with data.yaml, obj.data, instances_train.json, "
    "Pascal VOC's xml files, or images and .txt files"
)
YAML_SUFFIXES = (".yaml", ".yml")
USUAL_NAMES = ("data.yaml", "data.yml", "obj.data")
# What lies beside pictures and is neither one nor its label file.
OTHER_SUFFIXES = frozenset(".cache .csv .data .html .json .labels .md .names .npy .txt .xml .yaml .yml".split())
UNKNOWN = "files that are not images of a known type"
CLASS_FILES = ("classes.txt", "obj.names", "data.names", "names", "_darknet.labels")
MOST_FOLDERS = 100  # that a path may begin with in vain
MOST_VALUES = 50_000  # of a YAML file, which is read several times
COMPARED_NAMES = 100  # of a list, to find out where its paths start
NAME_FILES = "a text file with one class per line, a data.yaml, Darknet's obj.data or a COCO json"
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_ENCODING = re.compile(rb"\s*<\?xml[^>]*?encoding=[\"']([\w.-]+)")


def find_set_file(folder: Path) -> Path | None:
    """The data.yaml or obj.data of a folder, or its only .yaml with ``train``, if it has one."""
    for name in USUAL_NAMES:
        if (folder / name).is_file():
            return folder / name
    found = []
    for path in folder.glob("*.[yY]*"):
        with suppress(DataError, OSError):  # any other YAML
            if path.suffix.lower() in YAML_SUFFIXES and "train" in load_yaml(path):
                found.append(path)
    return found[0] if len(found) == 1 else None


def is_set_file(place: Path) -> bool:
    """Whether ``place`` has the suffix of a data.yaml or an obj.data."""
    return place.suffix.lower() in (*YAML_SUFFIXES, ".data")


def is_image(name: str) -> bool:
    """Whether a file name has one of IMAGE_SUFFIXES."""
    return os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES


def xml_root(path: str | os.PathLike[str]) -> ElementTree.Element:
    """The root of a VOC file, tags in lower case, without namespace. Raises OSError, DataError."""
    content = read_file(path)
    declared = _ENCODING.match(content)  # not of UTF-16, which has a mark at its start
    try:
        # expat knows few encodings, and limits what entities expand to.
        encoding = declared[1].decode() if declared else ""
        root = ElementTree.fromstring(text_of(content, path, encoding=encoding))
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # LookupError: an unknown encoding
        raise DataError(f"{path} is not valid XML ({error})") from error
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2].lower()
    if root.tag != "annotation":
        raise DataError(f"{path} is not of Pascal VOC: it begins with <{root.tag}>, not with <annotation>")
    return root


def names_in(folder: str) -> list[str]:
    """The names in a folder, none of hidden files; none at all if it cannot be read."""
    with suppress(OSError):
        return [name for name in os.listdir(folder) if name[0] != "."]
    return []


class _Plain(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Neither the last of two equal keys nor octal or base-60 numbers: 010 and 1:30 are texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - the base class has it so
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:int"]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        keys = [str(key.value) for key, _ in node.value]
        for key, times in Counter(keys).items():
            if times > 1:
                raise yaml.YAMLError(f"the key {shown(key)} is there {times} times")
        return super().construct_mapping(node, deep)


_Plain.add_implicit_resolver("tag:yaml.org,2002:int", re.compile(r"[-+]?(0|[1-9]\d*)$"), [*"-+0123456789"])


def unknown_files(folders: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """Files in ``folders`` whose suffix is none of images, OTHER_SUFFIXES and ``more``."""
    known = {"", *IMAGE_SUFFIXES, *OTHER_SUFFIXES, *more}
    paths = [f"{folder}/{name}" for folder in sorted(folders) for name in sorted(names_in(folder))]
    return [path for path in paths if os.path.splitext(path)[1].lower() not in known and not os.path.isdir(path)]


def load_yaml(path: remote.Place) -> dict[str, Any]:
    """Read a YAML file, also at an address. Raises ``DataError`` if it does not hold keys."""
    text, depth = text_of(read_file(path), path), 0
    try:
        for number, event in enumerate(yaml.parse(text)):
            if number > MOST_VALUES:
                raise yaml.YAMLError(f"it holds more than {MOST_VALUES:,} values")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if isinstance(event, yaml.AliasEvent) or depth > 100:  # reading takes the square of the depth
                raise yaml.YAMLError("it has an alias or is nested deep: a few lines can be billions of values")
        content = yaml.load(text, _Plain)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: e.g. a date with a 13th month
        raise DataError(f"{path} is not valid YAML ({' '.join(str(error).split())})", "correct it") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} holds no keys", "name a data.yaml with train, val and names")
    return content


def read_set_file(path: Path) -> dict[str, Any]:
    """Keys of a data.yaml or obj.data, and its names as a list, if any. Raises ``DataError``."""
    is_yaml = path.suffix.lower() in YAML_SUFFIXES
    if is_yaml:
        content = load_yaml(path)
        names = content.get("names")
        if "kpt_shape" in content:
            raise DataError(f"{path} is for key points (kpt_shape), not for boxes", "name a set for detection")
        if isinstance(names, dict):  # {0: x, 1: y}
            by_number = {str(key): name for key, name in names.items()}
            numbers = list(map(str, range(len(names))))
            if by_number.keys() != set(numbers):
                raise DataError(f"{path}: the keys of names are {shown(list(names))}", "number them from 0 on")
            names = [by_number[number] for number in numbers]
    else:
        pairs = [line.partition("=") for line in read_lines(path) if not line.lstrip().startswith(("#", ";"))]
        content = {key.strip(): value.strip() for key, separator, value in pairs if separator}
        names = content.get("names")
        if names:
            names = _names_in(find_place(names, path, starts_of(path)))
    if names is not None:
        content["names"] = class_names(names, f"{path}: names")
        count = content.get("nc" if is_yaml else "classes", len(names))
        if str(count) != str(len(names)):  # a missing name would shift the others
            raise DataError(f"{path} holds {len(names)} names for {shown(count)} classes", "correct one")
    return content


def starts_of(path: Path, start: str = "") -> list[Path]:
    """Where relative paths in a data.yaml or obj.data may start; ``start`` is its ``path``.

    Darknet starts at the current folder, Ultralytics' programs in ``datasets`` in or beside it.
    """
    here = Path.cwd()
    folders = [path.parent, path.parent.parent, here]
    if start:
        folders += [here / "datasets", here / "../datasets"]
    return [*(folder / start for folder in folders), path.parent]


def find_place(name: str, path: Path, starts: list[Path]) -> Path:
    """The file or folder ``name`` that ``path`` mentions. Raises ``DataError`` if it is missing.

    Roboflow writes "../train/images" for one beside the file, others an old place: "/set/train".
    """
    name = name.replace("\\", "/")  # it may be written on Windows
    inside = re.sub(r"^(\.\./)+", "", name)
    tries = [path.parent / inside, *(start / tried for tried in (name, inside) for start in starts)]
    depth = min(inside.count("/"), MOST_FOLDERS)
    tries += [path.parent / tail(inside, count) for count in range(1, depth + 1)]
    places = list(dict.fromkeys(map(os.path.normpath, tries)))
    for place in places:
        if os.path.exists(place):
            return Path(place)
    looked = ", ".join(places)
    raise DataError(f"{path} names {name}, but there is no such place (looked for {looked})", "correct it")


def tail(name: str, dropped: int) -> str:
    """A path without its first ``dropped`` folders."""
    return name.split("/", min(dropped, name.count("/")))[-1]


def count_files(names: Sequence[str], bases: Sequence[Path]) -> tuple[int, list[int]]:
    """How many of the first names are files in each of ``bases``, after how many dropped folders.

    If none is, the names begin with folders that are not there: the fewest are dropped.
    """
    first = names[:COMPARED_NAMES]
    for dropped in range(min(max((name.count("/") for name in first), default=0), MOST_FOLDERS) + 1):
        counts = []
        for base in bases:
            counts.append(sum(os.path.isfile(os.path.join(base, tail(name, dropped))) for name in first))
        if any(counts):
            return dropped, counts
    return 0, [0] * len(bases)


def class_names(names: Any, where: str) -> list[str]:
    """Class names as texts. Raises ``DataError``, which names ``where``, if they are not a list."""
    # YAML reads yes, no, on and off as booleans.
    if not isinstance(names, list) or not names or not all(type(name) in (str, int, float) for name in names):
        raise DataError(f"{where} must be a list of texts, got {shown(names)}", "write one, with yes and no in quotes")
    texts = list(map(str, names))
    for name, times in Counter(texts).items():
        if times > 1:
            raise DataError(f"{where} lists {name!r} twice", "give each class its own name")
    return texts


def choose_classes(by_id: dict[int, str], names: list[str] | None, path: Path) -> dict[int, str]:
    """The classes (id to name) in ``names``, in its order; else all. Raises ``DataError``."""
    if names is None:
        return by_id
    id_of = {name: number for number, name in by_id.items()}
    for name in names:
        if name not in id_of:
            listed = ", ".join(id_of)
            raise DataError(f"data.names holds {name!r}, and the classes of {path} are {listed}", "correct it")
    return {id_of[name]: name for name in names}


def class_numbers(chosen: Any, names: Sequence[str], key: str) -> list[int]:
    """The numbers of the ``chosen`` classes among ``names``, ascending.

    ``chosen``, the option ``key``, is a name, a number from 0, or several. Raises ``DataError``.
    """
    entries = [chosen] if isinstance(chosen, str) or not isinstance(chosen, Iterable) else list(chosen)
    valid = [*names, *range(len(names))]
    wrong = [entry for entry in entries if isinstance(entry, bool) or entry not in valid]  # True == 1
    if wrong or not entries:
        problem = f"{key} holds {shown(wrong[0])}" if wrong else f"{key} is empty"
        listed = ", ".join(f"{number} {name}" for number, name in enumerate(names))
        raise DataError(f"{problem}, and the classes are {listed}", "some of these, by name or number")
    return sorted({valid.index(entry) % len(names) for entry in entries})


def read_names(path: Path) -> tuple[list[str], list[int] | None]:
    """Class names of a file; for a COCO json, in the order of category ids, the ids as well.

    The suffix tells which of ``NAME_FILES`` it is. Raises ``DataError`` for any other file.
    """
    names, ids = None, None
    why = ""
    try:
        if path.suffix.lower() == ".json":
            categories = json.loads(read_file(path))["categories"]
            by_id = {int(category["id"]): str(category["name"]) for category in categories}
            ids = sorted(by_id)
            names = [by_id[number] for number in ids]
        else:
            names = read_set_file(path).get("names") if is_set_file(path) else _names_in(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror})", f"name {NAME_FILES}") from error
    except DataError:
        raise
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        why = f" ({error!r})"
    if not names:
        raise DataError(f"{path} holds no class names{why}", f"name {NAME_FILES}")
    return names, ids


def _names_in(path: Path) -> list[str]:
    """The lines of a text file, one class each. Only the last ones may be empty."""
    lines = "\n".join(map(str.strip, read_lines(path, "strict"))).rstrip().splitlines()
    if "" in lines:
        number = lines.index("") + 1
        raise DataError(f"{path}:{number} is empty, but each line counts as a class", "write a name, or remove it")
    for line in lines:
        if line.startswith(("# ", "// ")):
            raise DataError(f"{path} holds {shown(line)}, but each line counts as a class", "remove it")
    return lines


def text_of(content: bytes, path: object, errors: str = "strict", encoding: str = "") -> str:
    """A text in ``encoding``, by default UTF-8, or UTF-16 with a mark. Raises ``DataError``."""
    with suppress(UnicodeDecodeError):
        text = content.decode(encoding or ("utf-16" if content[:2] in UTF_16 else "utf-8-sig"), errors)
        if "\0" not in text:
            return text
    raise DataError(f"{path} is not a text file in UTF-8", "save it as UTF-8, or name another")


def read_lines(path: Path, errors: str = "surrogateescape") -> list[str]:
    """The lines of a text file; names of files may have other bytes, as surrogates."""
    return text_of(read_file(path), path, errors).splitlines()


def first_column(line: str) -> str:
    """The image in a line of a list: -1 or 1 of a class (VOC), an xml file or boxes may follow."""
    columns = line.split() or [""]
    return columns[0] if is_image(columns[0]) or len(columns) == 2 else line.strip()


def mapped(path: Path) -> bytes | mmap.mmap:
    """The content of a file, not copied: it may be gigabytes. A pipe, maybe endless, has none."""
    if path.is_fifo():
        return b""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def read_file(path: str | os.PathLike[str], limit: int = sys.maxsize) -> bytes:
    """At most ``limit`` bytes of a regular file, an address or a picture in a tar, or OSError.

    Python's file objects make twice as many system calls, which takes as long as parsing a header.
    """
    if isinstance(path, str) and ("://" in path or ".tar@" in path):
        return remote.read(path, limit)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # do not wait for a pipe
    try:
        if not stat.S_ISREG((status := os.fstat(descriptor)).st_mode):  # a device may never end
            raise OSError(errno.EISDIR, "not a regular file", os.fspath(path))
        size = min(status.st_size, limit)
        data = os.read(descriptor, size)
        while len(data) < size and (more := os.read(descriptor, size - len(data))):
            data += more
    finally:
        os.close(descriptor)
    return data
