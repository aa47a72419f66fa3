"""How do the programs become Python calls? Options and errors as on the command line, results."""
