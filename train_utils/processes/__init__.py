"""How do the ranks of a run find each other, what do they share, and what if one is lost?"""
