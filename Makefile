# `make train` and `make test` need nothing but make and Python >= 3.11: each builds .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
N ?= 20000
SEED ?= $(shell $(PYTHON) -c 'import random; print(random.randrange(10**9))')

.PHONY: help setup train test test-core test-device test-tools test-processors test-megatron test-megatron-next test-megatron-lm test-megatron-lm-next test-hosts test-hosts-all test-nemo-rl test-axolotl test-timm soak check fuzz test-gpu bench guard package docs clean
help:
	@echo "make train       train a small language model with Muon and with AdamW on two ranks (ARGS=... passes options)"
	@echo "make test        every test of training on a CPU that needs no other framework, and of muonmesh train"
	@echo "make test-core   the same without muonmesh train"
	@echo "make test-device the tests of training on a GPU that need none: in Triton's interpreter, and on a simulated device"
	@echo "make test-tools  the tests of the other tools: audit, plan, doctor, conversion, forecasts, benchmarks"
	@echo "make test-processors the tests that multiply, as on a CPU with AMX, AVX-512 without bf16, and AVX2 alone"
	@echo "make test-megatron   the tests with Megatron-Core, in an environment of their own"
	@echo "make test-megatron-next  those with its newest version, which needs Python 3.12"
	@echo "make test-hosts      the tests with DeepSpeed, Trainer, TRL, PEFT, Accelerate, Lightning and torchtitan, likewise"
	@echo "make test-hosts-all  the tests with ms-swift, Axolotl, verl, OLMo-core, AReaL, unsloth and timm, likewise"
	@echo "make test-nemo-rl    those with NeMo-RL: NEMO_RL=/path/to/checkout"
	@echo "make test-axolotl    Axolotl's own trainer, which needs Python 3.12"
	@echo "make test-timm       those with timm alone"
	@echo "make soak        the longest tests, and more cases of others"
	@echo "make check       ruff, mypy --strict, names, and the quick tests; the same as pre-commit"
	@echo "make fuzz        N=20000 generated layouts, from a new seed (SEED=... for a known one)"
	@echo "make test-gpu    the tests and the benchmark that need CUDA"
	@echo "make package     builds wheel and sdist, checks them and installs them in a clean environment"
	@echo "make docs        builds the site of the documentation into site/, checks its links and opens its pages in Chromium"
	@echo "make bench       one optimizer step against its peers"
	@echo "make guard       fails if a step has become slower against its peers than a recorded run"

setup: $(VENV)/.ready
# The package is installed anew when the C files change, which are compiled then.
BUILT := pyproject.toml setup.py $(wildcard src/muonmesh/numerics/kernels/*.c)
$(VENV)/.ready: $(BUILT) constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "muonmesh needs Python >= 3.11; found %d.%d. Write: make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_BUILD_OPS=0 $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev,deepspeed]'
	touch $@

train: setup
	$(BIN)/muonmesh train $(ARGS)

# Elsewhere than in tests/gpu, torch and the frameworks would choose a GPU that they see, for ranks that outnumber it too.
test test-core test-device test-tools test-processors check soak fuzz test-megatron test-megatron-next test-hosts test-hosts-all test-nemo-rl test-axolotl test-timm: export CUDA_VISIBLE_DEVICES :=

# What a GPU does, on a machine that has none. With it `make test` would take too long.
DEVICE := tests/device $(wildcard tests/numerics/test_device_*.py tests/numerics/test_triton*.py)

# Two processes, one of them for all tests that use ranks (tests/conftest.py). ARGS="-n 0" makes it one, as --pdb needs.
test: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(DEVICE:%=--ignore=%) $(ARGS)

# The core alone: neither the tools nor `muonmesh train`.
test-core: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(DEVICE:%=--ignore=%) --ignore=tests/train $(ARGS)

test-device: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(DEVICE) $(ARGS)

# What the core does not import: a change of the core alone need not wait for them.
test-tools: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder tests/tools $(ARGS)

# What depends on the processor, on processors that this one may not be (tests/support/pretended.py). Less of it can be
# pretended than there is: ARGS may name other files.
MULTIPLY := tests/numerics/test_newton_schulz.py tests/numerics/test_dense.py tests/numerics/test_kernels.py \
	tests/numerics/test_compiled.py tests/numerics/test_threads.py tests/numerics/test_rules.py tests/test_optimizer.py \
	tests/tools/test_doctor.py tests/claims/test_ambient.py tests/claims/test_behaviour.py tests/claims/test_same_update.py \
	tests/numerics/test_rules_ranks.py
test-processors: setup
	for processor in amx avx512 avx2; do \
		MUONMESH_TEST_PROCESSOR=$$processor $(BIN)/python -m pytest -n 2 --no-loadscope-reorder $(or $(ARGS),$(MULTIPLY)) || exit 1; \
	done

# Megatron-Core wants an environment of its own: nothing in the package's own tests should find it by accident.
MEGATRON := .venv-megatron
$(MEGATRON)/.ready: $(BUILT) constraints.txt constraints-megatron.txt
	$(PYTHON) -m venv $(MEGATRON)
	$(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(MEGATRON)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-megatron.txt -e '.[megatron,triton]' numpy pytest einops
	touch $@

test-megatron: $(MEGATRON)/.ready
	$(MEGATRON)/bin/python -m pytest tests/megatron $(ARGS)

# The newest Megatron-Core, which wants Python 3.12 (PYTHON312=/path/to/python3.12). PyPI's torch for it is built for CUDA.
PYTHON312 ?= python3.12
MEGATRON_NEXT := .venv-megatron-next
$(MEGATRON_NEXT)/.ready: $(BUILT) constraints.txt constraints-megatron-next.txt
	$(PYTHON312) -m venv $(MEGATRON_NEXT)
	$(MEGATRON_NEXT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(MEGATRON_NEXT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-megatron-next.txt -e '.[megatron,triton]' numpy pytest einops
	touch $@

test-megatron-next: $(MEGATRON_NEXT)/.ready
	$(MEGATRON_NEXT)/bin/python -m pytest tests/megatron $(ARGS)

# Megatron-LM's own pretrain_gpt.py, which is in no package: MEGATRON_LM is a checkout of its tag core_v0.16.1, or, for -next,
# of core_v0.19.0.
test-megatron-lm: $(MEGATRON)/.ready
test-megatron-lm-next: $(MEGATRON_NEXT)/.ready
test-megatron-lm test-megatron-lm-next:
	@test -f "$(MEGATRON_LM)/pretrain_gpt.py" || { echo "Write make $@ MEGATRON_LM=/path/to/Megatron-LM"; exit 1; }
	$(<D)/bin/python -m pip install --quiet --disable-pip-version-check six requests regex pyyaml pydantic
	MEGATRON_LM=$(MEGATRON_LM) $(<D)/bin/python -m pytest tests/megatron_lm $(ARGS)

# The houses where people train, likewise: their packages are many and heavy. torchtitan imports triton on a CPU too.
HOSTS := .venv-hosts
$(HOSTS)/.ready: $(BUILT) constraints.txt constraints-hosts.txt
	$(PYTHON) -m venv $(HOSTS)
	$(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_BUILD_OPS=0 $(HOSTS)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-hosts.txt -e '.[hosts,train,deepspeed,triton]' bitsandbytes optimum-quanto torchao pytest
	touch $@

test-hosts: $(HOSTS)/.ready
	$(HOSTS)/bin/python -m pytest tests/hosts $(ARGS)

# Hosts that want other versions of what the hosts above have. Axolotl comes without its dependencies, which want CUDA.
HOSTS_ALL := .venv-hosts-all
$(HOSTS_ALL)/.ready: $(BUILT) constraints.txt constraints-hosts-all.txt
	$(PYTHON) -m venv $(HOSTS_ALL)
	$(HOSTS_ALL)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	DS_BUILD_OPS=0 $(HOSTS_ALL)/bin/python -m pip install --quiet --disable-pip-version-check \
		-c constraints-hosts-all.txt -e . ms-swift deepspeed==0.19.8 pytest
	$(HOSTS_ALL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps axolotl==0.19.0
	touch $@

# verl beside the hosts that others test too, with the TRL that it wants; its own pins of torch and transformers are older.
VERL := .venv-hosts-verl
$(VERL)/.ready: $(BUILT) constraints.txt constraints-hosts.txt
	$(PYTHON) -m venv $(VERL)
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_BUILD_OPS=0 $(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-hosts.txt -e '.[hosts,train,deepspeed]' pytest
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray==2.60.0 tensordict==0.10.0 \
		hydra-core==1.3.8 codetiming==1.4.0 torchdata==0.11.0 cachetools==8.0.1 pylatexenc==2.11
	$(VERL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps verl==0.9.1 trl==0.27.0
	touch $@

# AReaL and unsloth, likewise.
RL := .venv-hosts-rl
$(RL)/.ready: $(BUILT) constraints.txt constraints-hosts.txt constraints-hosts-rl.txt
	$(PYTHON) -m venv $(RL)
	$(RL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_BUILD_OPS=0 $(RL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-hosts.txt -e '.[hosts,train,deepspeed,triton]' bitsandbytes torchao pytest
	$(RL)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r constraints-hosts-rl.txt
	touch $@

# NeMo-RL is in no package: NEMO_RL is a checkout. It wants an older transformers.
NEMO := .venv-hosts-nemo-rl
$(NEMO)/.ready: $(BUILT) constraints.txt constraints-hosts.txt
	$(PYTHON) -m venv $(NEMO)
	$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	DS_BUILD_OPS=0 $(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		-c constraints-hosts.txt -e '.[hosts,train,deepspeed]' pytest
	$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt ray==2.60.0 tensordict==0.15.3 \
		hydra-core==1.3.8 nvidia-ml-py==13.615.71 pyzmq==27.3.0 prometheus_client==0.26.0
	$(NEMO)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps transformers==5.8.1 tokenizers==0.22.2 \
		huggingface_hub==1.29.0
	touch $@

test-nemo-rl: $(NEMO)/.ready
	@test -d "$(NEMO_RL)/nemo_rl" || { echo "Write make test-nemo-rl NEMO_RL=/path/to/RL"; exit 1; }
	NEMO_RL=$(NEMO_RL) $(NEMO)/bin/python -m pytest --noconftest tests/nemo_rl $(ARGS)

# The newest Axolotl wants Python 3.12. With all that it depends on, its own trainer runs on a CPU.
AXOLOTL := .venv-hosts-axolotl
$(AXOLOTL)/.ready: $(BUILT) constraints-hosts-axolotl.txt
	$(PYTHON312) -m venv $(AXOLOTL)
	$(AXOLOTL)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(AXOLOTL)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-hosts-axolotl.txt -e . \
		axolotl==0.21.0 pytest
	touch $@

test-axolotl: $(AXOLOTL)/.ready
	$(AXOLOTL)/bin/python -m pytest --noconftest tests/hosts_all/test_axolotl.py tests/hosts_all/test_axolotl_train.py $(ARGS)

# timm has models and no optimizer of ours to run: what is tested is how split_params sorts them, on meta.
TIMM := .venv-hosts-timm
$(TIMM)/.ready: $(BUILT) constraints.txt
	$(PYTHON) -m venv $(TIMM)
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . \
		timm==1.0.31 torchvision==0.28.0 numpy pytest
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		opencv-python-headless==5.0.0.93 polars==2.1.0 scipy==1.17.1 ultralytics-thop==2.2.3 matplotlib pillow psutil pyyaml requests
	$(TIMM)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps ultralytics==8.4.190
	touch $@

test-timm: $(TIMM)/.ready
	$(TIMM)/bin/python -m pytest --noconftest -p tests.hosts_all.without_torchvision_ops tests/hosts_all/test_timm.py \
		tests/hosts_all/test_ultralytics.py $(ARGS)

# OLMo-core wants an older filelock than constraints.txt has.
OLMO := .venv-hosts-olmo
$(OLMO)/.ready: $(BUILT)
	$(PYTHON) -m venv $(OLMO)
	$(OLMO)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(OLMO)/bin/python -m pip install --quiet --disable-pip-version-check -e . ai2-olmo-core==3.0.0 pytest
	touch $@

test-hosts-all: $(HOSTS_ALL)/.ready $(VERL)/.ready $(OLMO)/.ready $(RL)/.ready test-timm
	$(HOSTS_ALL)/bin/python -m pytest --noconftest tests/hosts_all --ignore=tests/hosts_all/test_verl.py \
		--ignore=tests/hosts_all/test_timm.py --ignore=tests/hosts_all/test_ultralytics.py --ignore=tests/hosts_all/test_olmo.py \
		--ignore=tests/hosts_all/test_areal.py --ignore=tests/hosts_all/test_unsloth.py \
		--ignore=tests/hosts_all/test_axolotl_train.py $(ARGS)
	$(OLMO)/bin/python -m pytest --noconftest tests/hosts_all/test_olmo.py $(ARGS)
	$(VERL)/bin/python -m pytest --noconftest tests/hosts_all/test_verl.py $(ARGS)
	$(RL)/bin/python -m pytest --noconftest tests/hosts_all/test_areal.py tests/hosts_all/test_unsloth.py $(ARGS)

check: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m tests.support.vague_names
	$(BIN)/python -m pytest -q -m "not slow and not ranks" tests tests/tools \
		$(foreach folder,device gpu train,--ignore=tests/$(folder)) $(ARGS)

# The command that make prints names the seed.
fuzz: setup
	FUZZ=$(N) FUZZ_SEED=$(SEED) $(BIN)/python -m pytest tests/claims/test_fuzz.py $(ARGS)

# What would make `make test` too long: more cases of the same, and commands that take minutes.
soak: setup
	$(BIN)/python -m pytest -n 2 --no-loadscope-reorder -m soak $(ARGS)
	$(BIN)/python -m pytest -m soak tests/tools $(ARGS)
	$(BIN)/python -m pytest -m soak tests/hosts/test_deepspeed.py $(ARGS)

test-gpu: setup
	$(BIN)/python -m tests.gpu.run

bench: setup
	$(BIN)/python -m benchmarks.step $(ARGS)

# Outside `make test`: ratios on a machine that does something else too are no test.
guard: setup
	$(BIN)/python -m benchmarks.guard $(ARGS)

# What would be uploaded, in an environment that has neither torch nor the project. Nothing is uploaded.
PACKAGE := .venv-package
$(PACKAGE)/.ready: constraints.txt
	$(PYTHON) -m venv $(PACKAGE)
	$(PACKAGE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine pytest
	touch $@

package: $(PACKAGE)/.ready
	$(PACKAGE)/bin/python -m pytest --noconftest tests/package $(ARGS)

# The site, built from the pages and the docstrings without importing the package; links are checked, and that nothing
# is loaded from elsewhere when a page is read. Each page is opened in headless Chromium, where that is installed.
DOCS := .venv-docs
$(DOCS)/.ready: constraints-docs.txt
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check -r constraints-docs.txt
	touch $@

docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict --clean
	$(DOCS)/bin/python docs/site/check.py site
	$(DOCS)/bin/python docs/site/browser.py site

clean:
	rm -rf $(VENV) $(MEGATRON) $(MEGATRON_NEXT) $(HOSTS) $(HOSTS_ALL) $(RL) $(NEMO) $(AXOLOTL) $(TIMM) $(PACKAGE) $(DOCS) site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
