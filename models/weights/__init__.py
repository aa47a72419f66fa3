"""How weights are read and written."""
