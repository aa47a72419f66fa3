"""Callbacks of plugins: what they see at each moment of a training, and what they change in it."""
