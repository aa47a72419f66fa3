"""What is in an image or text file, and how are many files read at once?"""
