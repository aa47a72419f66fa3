"""How many images fit, and what does the user read when they do not?"""
