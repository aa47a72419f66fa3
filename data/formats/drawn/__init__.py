"""Data sets that the project draws."""
