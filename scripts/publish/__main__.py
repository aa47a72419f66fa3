"""``python -m scripts.publish``."""

from conf.programs import run

if __name__ == "__main__":
    run("publish")
