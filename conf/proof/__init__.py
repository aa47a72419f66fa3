"""What a run was made of, and whether it comes out the same again."""
