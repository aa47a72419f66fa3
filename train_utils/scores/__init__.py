"""How good detections are, which files hold them, and how long they take."""
