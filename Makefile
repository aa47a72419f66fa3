# .ci/run uses these targets, too.
.PHONY: setup test coverage lint docs bench clean

setup:
	uv sync
	[ -d .git ] && uv run pre-commit install || true

test:
	uv run pytest

coverage: # the suite with a quarter more CPU time; OmegaConf takes coverage for a debugger unless OC_CAUSE=0
	uv run coverage erase
	OC_CAUSE=0 uv run coverage run -m pytest; status=$$?; uv run coverage combine -q && uv run coverage report && exit $$status

lint:
	uv run ruff check
	uv run ruff format --check
	uv run codespell
	uv run mypy
	uv run mypy --platform darwin --cache-dir .mypy_cache/darwin

docs:
	uv run python -m scripts.options_page docs/train/options.md
	uv run zensical build --strict --clean

bench:
	uv run python -m scripts.bench.step yolov3-tiny 320 8

clean:
	rm -rf .coverage* site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
