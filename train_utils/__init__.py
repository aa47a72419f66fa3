"""Training machinery that knows neither models nor data: ranks, loop, checkpoints, scores."""
