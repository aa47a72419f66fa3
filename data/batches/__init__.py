"""Which images come when, at which size, on which rank, and how are they loaded?"""
