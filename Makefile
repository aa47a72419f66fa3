# Six targets; .ci/run uses them too.
.PHONY: setup test lint docs bench clean

setup:
	uv sync
	[ -d .git ] && uv run pre-commit install || true

test:
	uv run pytest

lint:
	uv run ruff check
	uv run ruff format --check
	uv run codespell
	uv run mypy
	uv run mypy --platform darwin --cache-dir .mypy_cache/darwin

docs:
	uv run python -m scripts.options_page docs/options.md
	uv run zensical build --strict --clean

bench:
	uv run python -m scripts.bench.step yolov3-tiny 320 8
	uv run python -m scripts.bench.evaluation scoring 2

clean:
	rm -rf site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
