"""What is wrong with a data set, what is in it, and which anchors fit it."""
