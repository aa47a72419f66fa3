"""How the ranks of a run find each other, what they share, and what happens if one is lost."""
