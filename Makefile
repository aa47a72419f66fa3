# .ci/run uses these targets, too.
RUN = uv run --group dev
.PHONY: setup test test-release test-all coverage lowest newest lint docs bench pins clean

setup:
	uv sync --group dev
	[ -d .git ] && $(RUN) pre-commit install || true

test: # what a day's change can break
	$(RUN) pytest

test-release: # the rest, which a release must pass, too
	$(RUN) pytest -m release -n 3 # as its processes also wait

test-all: test test-release

coverage: # all tests with a quarter more CPU time; OmegaConf takes coverage for a debugger unless OC_CAUSE=0
	$(RUN) coverage erase
	OC_CAUSE=0 $(RUN) coverage run -m pytest -m "" -n 3; status=$$?; $(RUN) coverage combine -q && $(RUN) coverage report && exit $$status

lowest: # the programs with the oldest packages that pyproject.toml allows
	uv venv -q --clear --python 3.11 .venv-lowest
	uv pip install --python .venv-lowest --resolution lowest-direct -r pyproject.toml --group dev
	.venv-lowest/bin/python -m pytest -n 0 -m "" tests/test_programs.py

newest: # the same with the newest ones, release candidates of Hydra and OmegaConf among them
	uv venv -q --clear --python 3.14 .venv-newest
	uv pip install --python .venv-newest -r pyproject.toml --group dev
	.venv-newest/bin/python -m pytest -n 0 -m "" tests/test_programs.py tests/conf

lint:
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) codespell
	$(RUN) mypy
	$(RUN) mypy --platform darwin --cache-dir .mypy_cache/darwin

docs:
	$(RUN) python -c "from conf.cli import help, program; print(help.options_page(program.PROGRAMS), end='')" > docs/train/options.md
	$(RUN) zensical build --strict --clean

bench:
	$(RUN) python -m scripts.bench yolov3-tiny 320 8

pins: # keeps the versions, adds what is new, drops what nothing needs; UPGRADE=-U takes the newest
	uv pip compile -q --universal --python-version 3.11 --all-extras --group dev --no-annotate --no-header \
		$(UPGRADE) pyproject.toml -o .ci/constraints.txt > /dev/null

clean:
	rm -rf .venv-lowest .venv-newest .ci/*.egg-info .coverage* dist site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*/*' -prune -exec rm -rf {} +
