"""How a .cfg becomes a network."""
