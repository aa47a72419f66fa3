"""How an image becomes a training sample: planned first, then drawn once."""
