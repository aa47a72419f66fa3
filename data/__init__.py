"""Data sets: from annotation files and images to batches of network input."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # reads __init__.pyi
