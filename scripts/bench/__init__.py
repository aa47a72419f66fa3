"""Measurements of speed, as ratios between variants in one run: machines are shared and noisy."""
