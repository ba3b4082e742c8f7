# Everything a fresh machine needs is Python 3.11+ and make: `make demo`, then `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench schema clean
.DELETE_ON_ERROR:

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("equivcheck needs Python 3.11 or newer: make PYTHON=python3.11 ...") if sys.version_info < (3, 11) else None'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,lint]'
	$(BIN)/python -m pip install --quiet --no-deps 'rapidocr>=3.10,<4'  # for one of its models (tests/test_ppocr.py)
	touch $@

# The main job on a trained int8 net and a scanned digit, on the embedded virtual NPU.
demo: $(VENV)/.installed
	$(BIN)/equivcheck diff fixtures/digits_qdq_s8.onnx --split-at GlobalAveragePool \
	    -i fixtures/digits/08_8.png --preprocess fixtures/digits.toml

test: $(VENV)/.installed
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(VENV)/.installed
	$(BIN)/python tests/bench/vnpu.py
	$(BIN)/python tests/bench/real_models.py
	$(BIN)/python tests/bench/metrics.py
	$(BIN)/python tests/bench/diff.py
	$(BIN)/python tests/bench/causes.py
	$(BIN)/python tests/bench/missing.py
	$(BIN)/python tests/bench/recordings_memory.py
	$(BIN)/python tests/bench/worker.py
	$(BIN)/python tests/bench/pairs_tflite.py
	$(BIN)/python tests/bench/tflite.py

# The schema of --json, generated from the structs; a test holds the committed file to them.
schema: $(VENV)/.installed
	$(BIN)/python -m equivcheck.result > equivcheck/result.schema.json

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build dist
