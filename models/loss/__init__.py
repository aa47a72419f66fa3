"""How far the raw maps are from the targets."""
