"""What a command line becomes: options, ranks, run folders and answers. Imports no torch."""
