"""Tools around training; run them as `python -m scripts.<name>`."""
