"""Tools around training; run them as `python -m scripts.<name>`."""

import conf as conf  # refuses systems on which none of them works
