"""How ranks train one model: gradient sync and batch statistics; compiled steps."""
