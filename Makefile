# Everything a newcomer or a machine runs. `make help` lists it; `.ci/run` runs the same targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install demo test processes accelerator grid faults test-gpu gpu-here check format lessons site docs pictures clean
.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

install: $(INSTALLED)  ## the package, editable, in a virtual environment with the tested versions of constraints.txt

# setuptools first and no build isolation: an isolated build would fetch one of its own, of any version.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"meshwise needs Python 3.11 or later, and $(PYTHON) is {v[0]}.{v[1]}; name one: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt setuptools
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev,plot,tensorboard,hf,peft]'
	touch $@

demo: install  ## train a small GPT on the standard library's source, on 4 local processes
	$(BIN)/meshwise train examples/demo.toml

test processes accelerator grid test-gpu: export OMP_NUM_THREADS := 1
# Empty is off. The suite starts some hundred processes, each of which would compile the whole package anew.
test processes accelerator grid test-gpu: export PYTHONDONTWRITEBYTECODE :=

# More files than cores: with four, two cores are idle for a third of the time.
test: install  ## the whole suite, six files at a time: some wait for processes while others compute
	$(BIN)/python -m pytest -n 6 --dist loadfile --no-loadscope-reorder

# Without what starts its own processes, or has no ranks.
processes: install  ## the suite again, with processes that share memory where it has threads
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --on processes tests \
		$(addprefix --ignore tests/,bench cli comm planner simulate view)

accelerator: install  ## the tests of plans again, on simulated GPUs, which find races between streams and deadlocks
	$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder --on accelerator \
		tests/accelerator tests/data_parallel/test_agreement.py

grid: install  ## every cell of every grid of plans, of which `test` runs a part
	$(BIN)/python -m pytest -n 2 -m grid --whole-grids

faults: install  ## 220 faults into a small job (kills, stopped ranks, full disks, harmed files), and what they led to
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m faults.campaign

test-gpu: install  ## the tests that need a CUDA device; they skip where there is none
	$(BIN)/python -m pytest -m gpu

# The machine's own torch and no network: PYTHON is an interpreter that has torch, pytest, numpy, rich, tyro, tomlkit and
# safetensors, and cloudpickle for --on gpu (WHEELS: a folder with the wheels of those that it lacks, carried along).
gpu-here: export PYTHONPATH := src:tests$(if $(WHEELS),:$(WHEELS)/unpacked)
gpu-here:  ## on a machine with GPUs, without installing: doctor, the GPU tests, grids on one GPU and on two, figures
	$(if $(WHEELS),$(PYTHON) -m pip install --quiet --no-index --find-links $(WHEELS) --target $(WHEELS)/unpacked --no-deps $(notdir $(basename $(wildcard $(WHEELS)/*.whl))))
	$(PYTHON) -m meshwise doctor
	$(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark -n 4 -m gpu
	$(PYTHON) -m pytest -p no:cacheprovider -p no:benchmark -n 4 --on gpu tests/data_parallel/test_agreement.py \
		tests/pipeline/test_grid.py
	$(PYTHON) benchmarks/gpu_plans.py
	$(PYTHON) benchmarks/gpu_step.py

check: install  ## lint, format and types, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: install  ## mend what check would complain about, where that is mechanical
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

lessons: install  ## every lesson of the course, on four threads and on four processes
	OMP_NUM_THREADS=1 $(BIN)/meshwise lesson all
	OMP_NUM_THREADS=1 $(BIN)/meshwise lesson all --processes

site: install  ## the site: lessons with their output, guides and reference, into build/site; its links are checked
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[site]'
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m site_source build/site-source
	$(BIN)/python -m mkdocs build --strict --quiet --config-file build/mkdocs.yml

docs: install  ## make the generated pages of docs/ again
	PYTHONPATH=tests $(BIN)/python -m plans_page
	PYTHONPATH=tests $(BIN)/python -m life_of_a_step
	PYTHONPATH=tests $(BIN)/python -m api_page

DRAW := $(BIN)/meshwise draw
BESIDE := $(BIN)/meshwise simulate examples/demo.toml --on "2x8 a100-80" --data.context 1024 --train.batch 64 \
	--model.arguments layers=24 width=2048 heads=16 --plan "pp=4 dp=2 tp=2 microbatches=8 zero=1 precision=bf16" \
	--compare "dp=4 tp=4 zero=1 precision=bf16" "dp=16 zero=3 precision=bf16"
CHROMIUM := chromium --headless --no-sandbox --disable-gpu --disable-background-networking --hide-scrollbars --log-level=3

pictures: install  ## draw docs/images again, but for what was measured; needs Chromium for the page
	$(DRAW) schedule --plan "pp=4 microbatches=8" --png docs/images/schedule-1f1b.png
	$(DRAW) schedule --plan "pp=4 microbatches=8 schedule=zb-h1" --png docs/images/schedule-zb-h1.png
	$(DRAW) schedule --plan "pp=4 microbatches=8 schedule=zb-v" --png docs/images/schedule-zb-v.png
	$(DRAW) schedule --plan "pp=4 microbatches=8 schedule=interleaved virtual_stages=2" --png docs/images/schedule-interleaved.png
	$(DRAW) mesh --plan "pp=4 dp=2 tp=2" --on "2x8 a100-80" --png docs/images/mesh.png
	$(BESIDE) --html build/plans.html
	$(CHROMIUM) --user-data-dir=$$(mktemp -d) --window-size=1300,2000 --screenshot=docs/images/page.png file://$(CURDIR)/build/plans.html

clean:  ## remove the virtual environment and every cache
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis src/*.egg-info
