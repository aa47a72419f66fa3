"""What a program answers instead of running: help, its version, the option that was meant."""
