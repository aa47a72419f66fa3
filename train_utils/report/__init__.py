"""What a run says of itself: tables, logs, plots, pages and copies in a bucket."""
