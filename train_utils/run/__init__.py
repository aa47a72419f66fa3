"""What does a run leave on the disk, and how does it go on from there?"""
