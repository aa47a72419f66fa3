"""Options that several kinds of sections share, read and checked."""

from models.cfg.parse import Section
from models.network.activations import ACTIVATIONS
from models.network.graph import Shape

MAX_WINDOW = 128  # rows of a kernel, dilation included, or of a pool; published networks have up to 16


def read_strides(section: Section, default: int) -> tuple[int, int]:
    """Strides of (rows, columns): stride_y and stride_x where they are given, else stride for both."""
    stride = section.integer("stride", default, minimum=1)
    return section.integer("stride_y", stride, minimum=1), section.integer("stride_x", stride, minimum=1)


def check_grid(
    section: Section, shape: Shape, size: int, strides: tuple[int, int], total_padding: int, blurred: bool
) -> None:
    """Refuse windows of `size` rows and columns that do not divide the map of `shape`, with padding on both sides
    together, exactly by their strides: (rows + padding - size) // stride + 1 = rows / stride.

    blurred: a low-pass filter behind them has the strides, the windows then move by 1.
    """
    if size > MAX_WINDOW:
        raise section.error(f"has windows of {size} rows, more than {MAX_WINDOW}. fix: check size and dilation", "size")
    check_divisible(section, shape, max(strides))
    for stride in (1,) if blurred else strides:
        if not -stride <= total_padding - size < 0:
            raise section.error(
                f"with size {size}, stride {stride} and {total_padding} padded rows does not divide the map by"
                f" {stride}. fix: use pad=1 in a convolution, or leave out padding in a maxpool"
            )


def check_divisible(section: Section, shape: Shape, stride: int) -> None:
    """Refuse to divide the map of a global pooling."""
    if shape.stride is None and stride > 1:
        raise section.error(f"divides a map of one pixel by {stride}. fix: stride=1 behind an [avgpool]")


def read_blur(section: Section, strides: tuple[int, int]) -> int | None:
    """Size of the low-pass filter that antialiasing asks for and that then strides in place of the layer, or None."""
    kind = section.integer("antialiasing", 0, minimum=0, maximum=2)
    if kind == 2 and min(strides) == 1:
        raise section.error("antialiasing=2 needs strides of 2 or more: its window of 2 has no padding", "antialiasing")
    return {0: None, 1: 3, 2: 2}[kind]


def read_activation(section: Section, default: str) -> str:
    """Name of the activation, one of ACTIVATIONS."""
    return section.choice("activation", default, ACTIVATIONS)
