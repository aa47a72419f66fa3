"""Darknet YOLO networks: built from .cfg files, their loss, their decoding and their weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)  # reads __init__.pyi
