"""Options of how a detector looks at an image: once, or in several views. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Tta(StrEnum):
    """Test-time augmentation: ``nms`` and ``wbf`` name what merges the boxes of all views.

    ``nms``: non-maximum suppression, as within a view. ``wbf``: weighted boxes fusion.
    """

    none = "none"
    nms = "nms"
    wbf = "wbf"


@dataclass
class ViewConfig:
    """The views of an image: its slices, and each of them in several sizes, mirrored or not."""

    tta: Tta  # look again, mirrored and in the sizes tta_scales; merge by nms or wbf (weighted boxes fusion)
    tta_scales: list[float]  # factors on image_size, rounded to multiples of the network's stride
    slices: int | None  # side in pixels of the squares that larger images are cut into; null: not cut. The same as
    # image_size: full resolution
    slice_overlap: float  # share of its side that a slice has in common with the next; smaller objects are seen whole
    slice_whole: bool  # look at the whole image, too, for objects larger than the overlap

    @property
    def several(self) -> bool:
        """Whether an image may have more than one view."""
        return self.tta != Tta.none or self.slices is not None

    def check_views(self, section: str = "") -> None:
        """Raise ValueError for a value out of range, and for what does not go together."""
        if not self.tta_scales or not all(0.1 <= scale <= 4 for scale in self.tta_scales):
            raise ValueError(f"{section}tta_scales must be one or more numbers in 0.1..4, got {self.tta_scales}")
        if self.slices is not None and self.slices < 32:
            raise ValueError(f"{section}slices must be 32 or more pixels, or null, got {self.slices}")
        if not 0 <= self.slice_overlap <= 0.9:
            raise ValueError(f"{section}slice_overlap must lie in 0..0.9, got {self.slice_overlap}")
        if self.slices is not None and round(self.slice_overlap * self.slices) < 1 and not self.slice_whole:
            raise ValueError(
                f"{section}slice_overlap={self.slice_overlap:g} lets slices have nothing in common, so an object on a "
                f"border would be found twice. fix: {section}slice_whole=true, or some overlap"
            )
        if self.tta == Tta.wbf and self.slices is not None:
            raise ValueError(
                f"{section}tta=wbf averages boxes that all views see whole, and slices cut some. fix: {section}tta=nms"
            )
