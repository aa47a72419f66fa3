"""How this process was launched, and which rank, node and device it has."""
