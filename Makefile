# The things people do here. Each sets up what it needs, once, in $(VENV).
#
#   make train    train a click-through model on two parameter servers with two trainers
#   make train KILL=1   the same, and a trainer and a server are killed on the way
#   make tutorials   all tutorials run small, about five minutes   (tutorials/README.md)
#   make test     all tests          (make test ARGS="-k rref -x")
#   make test COMPILED=1   the same, against a build whose modules of calls are compiled
#   make compiled    that build as a wheel, in dist; takes minutes and a C compiler
#   make check    lint, format, strict types
#   make bench    compare with torch.distributed.rpc on this machine   (make bench ARGS="--help")
#   make gpu      test and measure tensors on one GPU; takes the PYTHON given, installs nothing
#   make soak     does memory stay flat over a million calls? five minutes   (ARGS="--help")
#   make chaos    a job whose workers are killed, stopped and cut off, six minutes
#                 (make chaos ARGS="--backend TENSORWIRE --tls --seconds 60"; --help says what else)
#   make attack   a job under the constant traffic of somebody without its key, ten minutes
#                 (ARGS="--standalone --seconds 60"; --help says what else)
#   make kills    the tests that kill processes at random moments, up to fifty times each instead of
#                 three, what takes long to be seen alive or dead, at full length, and a report
#   make conformance    PyTorch's own RPC tests against torch and against ours, 20 minutes
#                 (make conformance ARGS="tensorwire --part"; --help says what else;
#                 COMPILED=1 runs ours alone, against a compiled build)
#   make simulate   10 000 whole groups in a simulator where everything goes wrong, two to five minutes
#   make fuzz     ten minutes of made-up bytes for everything that reads from the network
#   make mutants    do the simulator's rules find every change of every decision? half an hour
#   make docs     the documentation as web pages, in build/docs
#   make clean    remove the environment and all caches; results in runs/ stay
#
# make train takes BACKEND, SERVERS, TRAINERS, STEPS, BATCH_SIZE, SEED, OUTPUT, KILL and FILES (pages
# in a file of the log; without it the log is no files):
#
#   make train BACKEND=TENSORPIPE SERVERS=3 TRAINERS=4 STEPS=300 SEED=7
#
# Which torch: the version below is the one we test with. From where pip takes it is pip's
# configuration; on Linux the usual index gives a CUDA build of several gigabytes. For the
# small one name PyTorch's CPU index (see "get started" on pytorch.org):
#
#   make train TORCH_INDEX=<address of the CPU index>
#
# An environment that already has a torch keeps it:   make test VENV=path/to/environment

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PIP_ARGS ?=
ARGS ?=
COMPILED ?=

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS)
READY := $(VENV)/.tensorwire-ready
# Without its restarts, as pytest-xdist can wait for ever for the tests of a process that crashed.
TEST := $(abspath $(RUN)) -m pytest --dist loadgroup --max-worker-restart 0
# A copy of all there is, with compiled modules; beside the sources they would hide these.
TREE := $(CURDIR)/build/compiled
THERE := $(if $(COMPILED),cd $(TREE) && COMPILED=1 PYTHONPATH=$(TREE))

.DEFAULT_GOAL := help
.PHONY: help setup train test check docs bench soak chaos conformance simulate mutants clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | sed '/^Which torch/,$$d'

setup: $(READY)
	@:

# Servers need no program; started again if they die, they find their cluster.
comma := ,
SERVICE = service=tensorwire.parameter_server,max_restarts=3
train: export RPC_BACKEND = $(or $(BACKEND),TENSORWIRE)
train: $(READY)
	@$(RUN) -m tensorwire.launch --standalone \
	  --role ps:$(or $(SERVERS),2),$(SERVICE) --role trainer:$(or $(TRAINERS),2)$(if $(KILL),$(comma)max_restarts=1) \
	  -m tutorials.parameter_server.train $(if $(STEPS),--steps $(STEPS)) \
	  $(if $(BATCH_SIZE),--batch-size $(BATCH_SIZE)) $(if $(SEED),--seed $(SEED)) \
	  $(if $(FILES),--files $(FILES)) $(if $(KILL),--kill) \
	  $(if $(OUTPUT),--output '$(OUTPUT)') $(ARGS)

.PHONY: tutorials
tutorials: RPCRUN = $(RUN) -m tensorwire.launch --standalone
tutorials: SMALL = $(if $(BACKEND),--backend $(BACKEND)) $(if $(SEED),--seed $(SEED))
tutorials: $(READY)
	$(RPCRUN) --role agent:1 --role observer:2,service \
	  -m tutorials.getting_started.cartpole --rounds 16 --steps 256 $(SMALL)
	$(RPCRUN) --role trainer:1 --role server:1,service \
	  -m tutorials.getting_started.language_model --steps 200 --width 64 $(SMALL)
	$(RPCRUN) --role server:1 --role trainer:2,service \
	  -m tutorials.digits.train --epochs 4 $(SMALL)
	$(RPCRUN) --role coordinator:1 --role server:2,service --role trainer:2,service \
	  -m tutorials.digits.sharded --epochs 4 $(SMALL)
	$(MAKE) train STEPS=100
	RPC_BACKEND=$(or $(BACKEND),TENSORWIRE) $(RPCRUN) --role ps:2,$(SERVICE) --role trainer:2 \
	  -m tutorials.parameter_server.words --steps 300
	RPC_BACKEND=$(or $(BACKEND),TENSORWIRE) $(RPCRUN) --role ps:2,$(SERVICE) \
	  --role web:1,service=tutorials.serving.web --role trainer:1 \
	  -m tutorials.serving.train --steps 200
	RPC_BACKEND=$(or $(BACKEND),TENSORWIRE) $(RPCRUN) --role ps:2,$(SERVICE) \
	  --role trainer:1,max_restarts=1 -m tutorials.trainer.fine_tune --steps 40 --kill
	$(RPCRUN) --role server:1 --role trainer:2,service \
	  -m tutorials.ddp_rpc.train --epochs 1 $(SMALL)
	$(RPCRUN) --role trainer:1 --role features:1,service --role classifier:1,service \
	  -m tutorials.profiling.profile --epochs 2 $(SMALL)
	$(RPCRUN) --role agent:1 --role observer:2,service \
	  -m tutorials.batching.inference --rounds 2 $(SMALL)
	$(RPCRUN) --role server:1 --role trainer:4,service \
	  -m tutorials.batching.updates --rounds 2 $(SMALL)
	$(RPCRUN) --role main:1 --role stage:2,service \
	  -m tutorials.pipeline.train --steps 100 --width 64 --rounds 2 $(SMALL)
	$(RPCRUN) --role main:1 --role stage:3,service,max_restarts=1 \
	  -m tutorials.pipeline.hugging_face --steps 40 $(SMALL)

# Three processes for two cores: tests of jobs wait most of the time, for silence or for a lease's end.
test: $(READY) $(if $(COMPILED),compiled-tree)
	@$(THERE) $(TEST) -n 3 $(ARGS)

.PHONY: compiled compiled-tree
compiled: $(READY)
	@rm -f dist/tensorwire-*-cp*.whl
	@TENSORWIRE_COMPILE=1 $(RUN) -m pip wheel --quiet --disable-pip-version-check $(PIP_ARGS) \
	  --no-deps --wheel-dir dist .
	@ls dist/tensorwire-*-cp*.whl

compiled-tree: compiled
	@rm -rf $(TREE) && mkdir -p $(TREE)
	@tar -c --exclude-vcs --exclude='./build' --exclude='./dist' --exclude='./runs' \
	  --exclude='./.venv*' --exclude='./.*_cache' --exclude='*.egg-info' --exclude='__pycache__' . \
	  | tar -x -C $(TREE)
	@$(PIP) --no-deps --upgrade --target $(TREE) dist/tensorwire-*-cp*.whl
	@$(THERE) $(abspath $(RUN)) -m tensorwire | grep '^modules *compiled'

check: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy --strict
	$(RUN) -m mypy --strict benchmarks chaos tutorials

# Fails on a broken link, a name that does not exist and a docstring that cannot be read.
docs: $(READY)
	$(RUN) -m sphinx --quiet --fresh-env --fail-on-warning --keep-going docs build/docs
	@echo 'open build/docs/index.html'

bench: $(READY)
	@$(RUN) -m benchmarks $(ARGS)

.PHONY: kills
kills: $(READY)
	@$(TEST) -n 2 -m kills --kills 50 $(ARGS)

# Needs torch with CUDA and pytest where PYTHON is; without a GPU it says so and ends well.
.PHONY: gpu
gpu:
	@PYTHONPATH=. $(PYTHON) -m benchmarks.gpu $(ARGS)

soak: $(READY)
	@$(RUN) -m benchmarks.soak $(ARGS)

chaos: $(READY)
	@$(RUN) -m chaos $(ARGS)

.PHONY: attack
attack: $(READY)
	@$(RUN) -m chaos.attack $(ARGS)

conformance: $(READY) $(if $(COMPILED),compiled-tree)
	@$(THERE) $(abspath $(RUN)) tests/conformance \
	  $(or $(ARGS),$(if $(COMPILED),tensorpipe tensorwire,torch tensorpipe tensorwire --table --report))

simulate: $(READY)
	@PYTHONPATH=. $(RUN) tests/simulation/many_seeds.py $(ARGS)

.PHONY: fuzz
fuzz: export FUZZ_SECONDS ?= 600
fuzz: $(READY)
	@$(TEST) -n 2 tests/fuzz $(ARGS)

mutants: $(READY)
	@PYTHONPATH=. $(RUN) tests/simulation/kill_mutants.py $(or $(ARGS),--fresh)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# torch first and alone, so that the second step finds it there and does not choose one itself.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or newer is needed" if sys.version_info < (3, 10) else 0)'
	@echo "setting up $(VENV) (only the first time, or after a change of pyproject.toml)" >&2
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -c 'import torch' 2>/dev/null \
	  || $(PIP) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) $(TORCH)
	@$(PIP) --editable '.[dev,tutorials]'
	@touch $@
