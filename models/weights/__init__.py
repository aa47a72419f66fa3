"""How are weights read and written?"""
