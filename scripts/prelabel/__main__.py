"""``python -m scripts.prelabel``."""

from conf.programs import run

if __name__ == "__main__":
    run("prelabel")
