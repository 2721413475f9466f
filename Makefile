# The two commands of the README: `make demo` and `make test`. The rest serves them.
# PYTHON=python3.12 chooses the interpreter, ARGS="--cp 4" goes to the demo.
PYTHON ?= python3
B := .venv/bin
BOUND := $(shell command -v timeout >/dev/null 2>&1 && echo timeout -k 10 1200)
SPHINX := $(B)/sphinx-build -q -E --keep-going -j 2 -b html -c docs . docs/_build/html

# several processes share the cores: threads that wait must sleep
export OMP_WAIT_POLICY ?= passive
export GOMP_SPINCOUNT ?= 0
unexport IN_TEST

.PHONY: help venv demo test check site gpu gpu-pack readme clean
help:      ; @sed -n 's/^\([a-z-]*\):.* *#\{2\} /\1\t/p' Makefile

venv:      ## make .venv, or bring it up to the pins
	@"$(PYTHON)" tools/environment.py

demo: venv ## two ranks prefill a document together, checked against one
	@$(B)/cpkv demo $(ARGS)

test: export OMP_NUM_THREADS ?= 1
test: check ## every check; ends in pytest's closing line
	$(BOUND) $(B)/nbdev_test
	$(SPHINX) -W
	$(BOUND) $(B)/python -m pytest

check: venv ## the quick half of `test`: in step, floors, generated pages, lint
	$(B)/python tools/in_step.py
	$(B)/python tools/floors.py --check
	$(B)/python tools/knobs.py --check
	$(B)/python docs/readme.py --check
	$(B)/ruff check -q .

site: venv ## docs/_build/html/index.html, without a network
	$(SPHINX)
	@echo "docs/_build/html/index.html"

gpu:       ## flagged cells and tests with PYTHON=, SAVE=1 keeps the outputs
	@"$(PYTHON)" tools/gpu.py $(if $(SAVE),--save)

gpu-pack: venv ## build/wheels: the pure-Python wheels that `make gpu` may lack
	@$(B)/python tools/gpu_pack.py

readme: venv ## README.md, docs/floors.md and docs/knobs.md anew
	$(B)/python docs/readme.py
	$(B)/python tools/floors.py
	$(B)/python tools/knobs.py

clean:     ## what was built; .venv stays
	rm -rf build docs/_build docs/_static/js docs/generated *.egg-info
