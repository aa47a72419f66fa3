"""How ranks train one model: gradient sync, batch statistics, time spent waiting."""
