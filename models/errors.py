"""The error that this package raises for users."""


class ModelError(ValueError):
    """An unusable .cfg, weights file or model option. The message names the place and the fix."""
