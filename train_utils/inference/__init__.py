"""A trained network in use: opened, called, its detections."""
