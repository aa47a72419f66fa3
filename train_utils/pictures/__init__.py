"""What does a run draw?"""
