"""The error of this package: one sentence for the user that names what is wrong and how to put it right."""

from __future__ import annotations


class DataError(ValueError):
    """A data set, or a setting that must fit it, cannot be used."""
