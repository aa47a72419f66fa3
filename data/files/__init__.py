"""What is in an image file, and how are many files read at once?"""
