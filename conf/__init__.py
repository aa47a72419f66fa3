"""Configuration: the YAML tree, its types (schema.py) and the border where it becomes plain objects (entry.py)."""
