"""What does a person see while a program works? Lines, a live line, and a training's table."""
