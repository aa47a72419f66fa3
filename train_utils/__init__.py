"""What runs with torch: ranks, the training loop, checkpoints, scores."""
