"""What does a Darknet .cfg say?"""
