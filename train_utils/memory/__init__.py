"""How many images fit into memory, and what the user reads if they do not fit."""
