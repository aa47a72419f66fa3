"""Where do options come from that nobody typed? Checkpoints, resumed runs, published weights."""
