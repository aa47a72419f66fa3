"""Where decoded images come from: the data set, a cache, or other pictures and videos."""
