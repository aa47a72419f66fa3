"""How does an image become a training sample: planned first, then drawn once?"""
