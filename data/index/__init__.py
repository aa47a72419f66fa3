"""Which images and boxes does a data set have? One flat, checked index for all processes."""
