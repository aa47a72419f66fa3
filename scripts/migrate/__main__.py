"""``python -m scripts.migrate``."""

from conf.programs import run

if __name__ == "__main__":
    run("migrate")
