"""Errors that end a run with one sentence for the user: each names what is wrong and how to put it right."""

from __future__ import annotations


class TrainError(RuntimeError):
    """The training cannot start or go on with these settings."""


class DistributedError(RuntimeError):
    """The processes of a run did not find each other, lost each other, or one of them failed for all."""


class SharedError(DistributedError):
    """One that all processes know: any of them may tell it for all."""


class CheckpointError(ValueError):
    """A checkpoint cannot be written, or a file is not an intact checkpoint of this project."""
