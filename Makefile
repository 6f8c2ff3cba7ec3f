# make table: train three small models, and compare them with the committed ones and the source's.
# make test: check the style, and run all tests that this machine can run; 15 to 25 minutes on two cores.
# make check: check the style, and run the fast tests; one to two minutes on two cores.
# make benchmark: measure the speed and memory of all attentions and public implementations; half an hour a call.
# make reproduce: test all claims of the sources, or some: make reproduce ARGS="claims=[headline,4] budget=3600"
# make torture: interrupt 100 commands, damage 200 files of runs and corpora, and say what was lost; ten minutes.
# make dashboard: write out/dashboard.html, a page that shows every run; open it in a browser.
# make clean: delete .venv, the cached texts and wandb's local files, but no runs.
# make help: print these lines.
PYTHON ?= python3
PY := .venv/bin/python
# --no-compile: Python compiles a module when it is first imported, and most are never imported. The result is kept even
# if the caller has switched this off; otherwise each process of the tests would compile all modules again, for seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile

.PHONY: table test check benchmark reproduce dashboard torture clean help

table: .venv/ready
	$(PY) train.py -m experiment=small attn=mha_plus,gmlp,aft
	$(PY) -m scripts.benchmark measure=rows
	$(PY) -m scripts.compare

test: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest

check: .venv/ready-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m pytest -m "not slow"

benchmark: .venv/ready-dev
	$(PY) -m scripts.benchmark

reproduce: .venv/ready
	$(PY) -m scripts.reproduce $(ARGS)

dashboard: .venv/ready
	$(PY) -m scripts.dashboard

.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "error: Python 3.11 or newer is needed; name one with make PYTHON=..."; exit 2; }
	@$(PYTHON) -m venv .venv || { echo "error: $(PYTHON) cannot make environments: install its venv package"; exit 2; }
	$(PIP) -r requirements.txt
	@touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(PIP) -r requirements-dev.txt
	@touch $@

torture: .venv/ready-dev
	$(PY) -m pytest tests/test_torture.py --faults 100

clean:
	rm -rf .venv data/cache out/wandb out/leet

help:
	@sed -n 's/^# make /make /p' Makefile
