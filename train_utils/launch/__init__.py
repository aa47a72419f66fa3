"""How was this process launched, which place does it have among the others, and which device?"""
