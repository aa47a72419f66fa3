"""Read and check options that several kinds of sections share."""

from models.cfg.parse import Section
from models.network.activations import ACTIVATIONS
from models.network.graph import Shape

MAX_WINDOW = 128  # rows of a kernel, dilation included, or of a pool; published networks have up to 16


def read_strides(section: Section) -> tuple[int, int]:
    """Strides of (rows, columns): stride_y and stride_x if given, else stride."""
    stride = section.integer("stride", 1, minimum=1)
    return section.integer("stride_y", stride, minimum=1), section.integer("stride_x", stride, minimum=1)


def check_grid(
    section: Section, shape: Shape, size: int, strides: tuple[int, int], total_padding: int, blurred: bool
) -> None:
    """Refuse windows that do not divide the map exactly by their strides.

    That is (rows + total_padding - size) // stride + 1 = rows / stride, and so for columns.
    blurred: a low-pass filter after the layer has the strides, so the windows move by 1.
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
    """Refuse to divide the one pixel of a global pooling."""
    if shape.stride is None and stride > 1:
        raise section.error(f"divides a map of one pixel by {stride}. fix: use stride=1 after an [avgpool]")


def read_blur(section: Section, strides: tuple[int, int]) -> int | None:
    """Size of the antialiasing filter, which takes over the layer's stride; None without one."""
    kind = section.integer("antialiasing", 0, minimum=0, maximum=2)
    if kind == 2 and min(strides) == 1:
        raise section.error("antialiasing=2 needs strides of 2 or more: its window of 2 has no padding", "antialiasing")
    return {0: None, 1: 3, 2: 2}[kind]


def read_activation(section: Section, default: str) -> str:
    """Name of the activation, one of ACTIVATIONS."""
    return section.choice("activation", default, ACTIVATIONS)
