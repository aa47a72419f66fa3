"""What is special about several trainings at once: their folders, their end and their table."""
