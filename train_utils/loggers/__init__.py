"""Loggers: CSV always, services where chosen; none can end or delay a training."""
