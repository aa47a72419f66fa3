"""What did a run give, and what do several give beside one another: pages for people."""
