"""Which images come when, at which size, on which rank, and how they are loaded."""
