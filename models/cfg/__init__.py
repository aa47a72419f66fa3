"""What a Darknet .cfg says."""
