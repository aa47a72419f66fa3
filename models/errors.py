"""The one error that users of this package meet."""


class ModelError(ValueError):
    """A .cfg, .weights file or model option that cannot be used; the message names the place and the fix."""
