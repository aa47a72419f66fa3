"""How do options become objects?"""
