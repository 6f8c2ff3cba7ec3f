# make table: train three small models, compare them and print the source's table.
# make test: all tests that this machine can run; ten minutes on two cores.
# make check: the fast ones, in about a minute.
# make benchmark: speed and memory of every attention, beside public implementations; half an hour.
# make reproduce: every claim of the sources; make reproduce ARGS="claims=[headline,4] tier=cpu budget=3600"
# make torture: runs that are killed, files that are harmed, rubbish for input, and what was lost.
# make dashboard: every run on one page, out/dashboard.html, to open in a browser.
# make clean: delete .venv, the cache of texts and wandb's mirrors; runs stay.
# make help: these lines.
PYTHON ?= python3
PY := .venv/bin/python

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
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

.venv/ready-dev: requirements-dev.txt .venv/ready
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

torture: .venv/ready
	$(PY) -m tests.torture

clean:
	rm -rf .venv data/cache out/wandb

help:
	@sed -n 's/^# make /make /p' Makefile
