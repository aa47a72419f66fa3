"""How does a .cfg become a network?"""
