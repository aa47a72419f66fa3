"""What happens in an epoch: its steps, what the ranks decide together after each, and what guards
them?
"""
