"""What happens in an epoch: its steps, what guards them, what ranks decide together after each."""
