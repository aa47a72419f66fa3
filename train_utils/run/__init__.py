"""What a run leaves on the disk, and how it resumes from there."""
