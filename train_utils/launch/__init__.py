"""How was this process launched, and which rank, node and device does it have?"""
