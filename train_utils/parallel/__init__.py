"""How do several processes train one model: gradient sync, batch statistics, and the time spent waiting?"""
