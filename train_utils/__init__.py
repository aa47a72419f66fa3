"""Training machinery that knows neither models nor data: processes, checkpoints, scores, logs, optimiser, loop."""
