"""Where do decoded images come from: the data set, a cache, or files and videos outside any data set?"""
