"""The bytes of a Darknet .weights file: a short header, then float32 values, all little-endian.

Header: major, minor, revision (int32), then the number of images seen in training, unsigned as in
Darknet: 64 bits from version 0.2 on, 32 bits before.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from models.errors import ModelError

Values = npt.NDArray[np.float32]
Version = tuple[int, int, int]

WEIGHTS_VERSION: Version = (0, 2, 5)  # what Darknet writes today
VERSION_BYTES, LONGEST_HEADER = 12, 20


@dataclass(frozen=True)
class WeightsFile:
    """An open .weights file: `values` mapped read-only, then `extra_bytes` that fill no value."""

    path: Path
    version: Version
    seen: int
    values: Values
    extra_bytes: int

    def held(self) -> str:
        """The number of values in the file, for messages."""
        extra = f" and {self.extra_bytes}/4 of another" if self.extra_bytes else ""
        return f"{len(self.values):,} values{extra}"


def open_weights(path: Path) -> WeightsFile:
    """Read the header of a .weights file and map its values.

    Raises ModelError if the file cannot be read or does not begin with a Darknet header.
    """
    try:
        with path.open("rb") as file:
            header, size = file.read(LONGEST_HEADER), os.fstat(file.fileno()).st_size
    except OSError as error:
        message = f"cannot read the weights {path} ({error.strerror}). fix: set model.weights to a file"
        raise ModelError(message) from error
    if len(header) < LONGEST_HEADER:
        raise ModelError(f"{path} has {size} bytes, too few for a Darknet .weights file. fix: download it again")
    major, minor, revision = (int(number) for number in np.frombuffer(header, "<i4", count=3))
    if not (0 <= major < 1000 and 0 <= minor < 1000 and revision >= 0):
        raise ModelError(
            f"{path} is no Darknet .weights file: it begins with {header[:VERSION_BYTES]!r}. fix: download it again if "
            "this is a web page or a git-lfs pointer, and let files of torch.save end in .pt"
        )
    kind = _seen_type((major, minor, revision))
    start = VERSION_BYTES + kind.itemsize
    count, extra = divmod(size - start, 4)
    seen = int(np.frombuffer(header, kind, count=1, offset=VERSION_BYTES)[0])
    values = np.memmap(path, "<f4", mode="r", offset=start, shape=(count,))
    return WeightsFile(path, (major, minor, revision), seen, values, extra)


def write_weights(path: Path, version: Version, seen: int, parts: Iterable[Values]) -> int:
    """Write a .weights file atomically: under another name, then renamed to `path`.

    Returns the number of values. Raises ModelError if writing fails or `seen` does not fit.
    """
    kind = _seen_type(version)
    if not 0 <= seen <= np.iinfo(kind).max:
        raise ModelError(
            f"seen={seen:,} does not fit the {8 * kind.itemsize} bits of a header of version {version[0]}.{version[1]}."
            f" fix: write version {WEIGHTS_VERSION[0]}.{WEIGHTS_VERSION[1]}, or a smaller seen"
        )
    temporary = path.with_name(f"{path.name}.tmp")
    count = 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(np.array(version, "<i4").tobytes() + np.array([seen], kind).tobytes())
                for part in parts:
                    file.write(np.ascontiguousarray(part, "<f4").data)
                    count += part.size
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(
            f"cannot write {path} ({error.strerror}). fix: choose a file in a folder that you may write to"
        ) from error
    return count


def _seen_type(version: Version) -> np.dtype[np.unsignedinteger]:
    wide = version[0] * 10 + version[1] >= 2  # Darknet's own rule
    return np.dtype("<u8") if wide else np.dtype("<u4")
