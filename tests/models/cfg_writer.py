"""Write small .cfg files for tests."""

CLASSES = 2


def section(kind: str, **options: object) -> str:
    """One section; an option called `from_` is `from`."""
    return "\n".join([f"[{kind}]", *(f"{key.rstrip('_')}={value}" for key, value in options.items()), ""])


def conv(filters: int, size: int = 1, stride: int = 1, activation: str = "leaky", **more: object) -> str:
    """A convolution, with batch normalisation unless batch_normalize=0."""
    options = {"batch_normalize": 1, "filters": filters, "size": size, "stride": stride, "pad": 1} | more
    return section("convolutional", **options, activation=activation)


def route(*layers: int, **more: object) -> str:
    return section("route", layers=",".join(map(str, layers)), **more)


def shortcut(*layers: int, activation: str = "linear", **more: object) -> str:
    return section("shortcut", **{"from": ",".join(map(str, layers))}, activation=activation, **more)


def head(
    *mask: int, anchors: str = "4,6, 10,12, 20,9", activation: str = "linear", classes: int = CLASSES, **more: object
) -> str:
    """A [yolo] section and the convolution before it."""
    filters = len(mask) * (5 + classes)
    listed = {"mask": ",".join(map(str, mask)), "anchors": anchors, "classes": classes}
    return conv(filters, activation=activation, batch_normalize=0) + section("yolo", **(listed | more))


def cfg(*sections: str, side: int = 64) -> str:
    """The text of a whole file."""
    return section("net", width=side, height=side, channels=3) + "".join(sections)
