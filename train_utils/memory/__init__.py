"""How many images fit into memory, and what does the user read if they do not?"""
