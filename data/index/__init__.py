"""Which images and boxes does a data set have: one flat, checked, memory-mapped index for all processes?"""
