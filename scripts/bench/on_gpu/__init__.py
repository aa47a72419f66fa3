"""The stages of scripts/bench/gpu.py: is this GPU's result right, and how fast is it."""
