"""What is in an image file: its header, its pixels, and how are many files read at once?"""
