"""How far are the raw maps from the targets?"""
