"""How options become objects."""
