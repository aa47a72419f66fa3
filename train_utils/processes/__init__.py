"""How do the processes of a run find one another, what do they share, and what happens when one is lost?"""
