"""What is in an image or text file, and how many files are read at once."""
