"""Report what was loaded from initial weights, in numbers and in one sentence."""

from dataclasses import dataclass
from pathlib import Path

from models.weights.file import Version


@dataclass(frozen=True)
class WeightsReport:
    """What a network loaded from a file of weights.

    layers_loaded of layers_total: layers that have weights, above all convolutions.
    values_loaded of values_total: the values in them.
    heads_left_out: whether the file's convolutions before [yolo] sections were not loaded.
    num_classes: the file's class count, None for a partial file.
    model_classes: the network's class count.
    cut: the last layer with weights of a partial file, None for a whole file.
    version, seen: the header of a .weights file.
    same_decoding: whether the file says how its heads are decoded, and it is as here.
    note: anything else that the user should know.
    """

    path: Path
    layers_loaded: int
    layers_total: int
    values_loaded: int
    values_total: int
    heads_left_out: bool
    num_classes: int | None
    model_classes: int
    cut: int | None = None
    version: Version | None = None
    seen: int | None = None
    same_decoding: bool = False
    note: str = ""

    @property
    def has_other_classes(self) -> bool:
        """Whether the file's class count is known and not the network's."""
        return self.num_classes not in (None, self.model_classes)

    @property
    def is_whole(self) -> bool:
        """Whether every layer with weights was loaded."""
        return self.layers_loaded == self.layers_total

    def __str__(self) -> str:
        note = f"; {self.note}" if self.note else ""
        if self.is_whole:
            classes = f", {plural(self.num_classes, 'class')}" if self.num_classes is not None else ""
            seen = f", trained on {self.seen:,} images" if self.seen else ""
            return (
                f"initial weights: all {self.values_total:,} values of {self.path}"
                f" ({plural(self.layers_total, 'layer')} with weights{classes}{seen}){note}"
            )
        rest = []
        if self.cut is not None:
            rest.append(f"the file ends after layer {self.cut}, later layers start fresh")
        if self.heads_left_out:
            theirs = f" for {plural(self.num_classes, 'class')}" if self.num_classes is not None else ""
            rest.append(
                f"its heads{theirs} were left out and those for {plural(self.model_classes, 'class')} start fresh"
            )
        return (
            f"initial weights: {self.layers_loaded} of {plural(self.layers_total, 'layer')} with weights"
            f" ({self.values_loaded:,} of {self.values_total:,} values) from {self.path}; {'; '.join(rest)}{note}"
        )


def plural(count: int, noun: str) -> str:
    """`count` and the noun, in the plural unless count is 1, for messages."""
    ending = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun if count == 1 else noun + ending}"
