# make sweep [STUDY=pilot] [RUNS=runs] [DATA=data]   prepare, run or resume, report; RUNS also s3://...
#            [HOURS=8]                               stops in order after so long
#            [RAY_ADDRESS=head:6379]                 on a Ray cluster
# make plan [STUDY=pilot]                            what a sweep would take, before it runs
# make report | status | prepare [STUDY=pilot]       the steps by themselves
# make tensorboard | optuna [STUDY=pilot] [PORT=6006]  views a study, on this machine alone
# make bundle [STUDY=pilot]                          one archive of all that a study came to
# make publish [STUDY=pilot]                         the small bundle of it in results/
# make check-results                                 results/: hashes, numbers, cells trained again
# make test                                          everything .ci/run checks
# make test-faults [SEED=1] [FAULTS=140]             kills and damage at random moments, half an hour
# make test-cluster                                  Ray nodes, ssh.sh, slurm.sh; S3 by moto; ten minutes
# make check                                         lint, format, types, commands of the docs
# make coverage                                      simulated studies: are the intervals honest?
# make coord-check                                   is muP on where it is on? table and figure
# make bench [QUICK=1]                               speed claims, as ratios; QUICK: do they run?
STUDY ?= pilot
RUNS ?= runs
DATA ?= data
PYTHON ?= python3
export RUNS DATA

VENV := .venv
BIN := $(VENV)/bin
STUDY_TOOL = $(BIN)/python -m tune_study

# What to type again, said when a sweep is interrupted.
AGAIN := make sweep$(if $(filter-out pilot,$(STUDY)), STUDY=$(STUDY))$(if $(filter-out \
  runs,$(RUNS)), RUNS=$(RUNS))$(if $(filter-out data,$(DATA)), DATA=$(DATA))$(if \
  $(HOURS), HOURS=$(HOURS))$(if $(RAY_ADDRESS), RAY_ADDRESS=$(RAY_ADDRESS))

.PHONY: sweep plan report status prepare bundle publish check-results calibrate tensorboard optuna \
  test test-integrations test-faults test-cluster check lint coverage bench coord-check clean

sweep: $(VENV)/installed
	@TUNE_STUDY_COMMAND="$(AGAIN)" $(STUDY_TOOL) sweep $(STUDY) $(if $(HOURS),--hours $(HOURS))

plan report status prepare bundle: $(VENV)/installed
	@$(STUDY_TOOL) $@ $(STUDY)

publish: $(VENV)/installed
	@$(STUDY_TOOL) bundle $(STUDY) --small --out results/$(STUDY)

check-results: $(VENV)/installed
	$(STUDY_TOOL) verify results/pilot
	$(STUDY_TOOL) verify results/tinystories-small

# What rules of divergence do to a control study: make calibrate [STUDY=control]
calibrate: STUDY = control
calibrate: $(VENV)/installed
	@TUNE_STUDY_COMMAND="make calibrate" $(STUDY_TOOL) sweep $(STUDY) && $(STUDY_TOOL) calibrate $(STUDY)

# Of a study in a store they lie in this folder: pilot-tensorboard, pilot-optuna.db.
VIEWS = $(if $(findstring ://,$(RUNS)),$(STUDY)-,$(RUNS)/$(STUDY)/)
# What is exported is brought up to date first; run it again in another terminal while a sweep runs.
tensorboard: $(VENV)/installed-integrations
	@$(STUDY_TOOL) export $(STUDY) tensorboard --out $(VIEWS)tensorboard
	$(BIN)/tensorboard --logdir $(VIEWS)tensorboard --host 127.0.0.1 --port $(or $(PORT),6006)

optuna: $(VENV)/installed-integrations
	@$(STUDY_TOOL) export $(STUDY) optuna --out $(VIEWS)optuna.db
	$(BIN)/optuna-dashboard sqlite:///$(VIEWS)optuna.db --host 127.0.0.1 \
	  --port $(or $(PORT),8080)

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest

# Against the real tools: Weights & Biases offline, an MLflow server on loopback, the viewers.
test-integrations: $(VENV)/installed-integrations $(VENV)/installed-dev
	$(BIN)/python -m pytest tests/test_integrations.py tests/test_export.py

# One scenario again, as a failure says: make test-faults SEED=1 FAULTS=140 SCENARIO=3
SEED ?= 1
FAULTS ?= 140
FAULTS_JSON ?= $(RUNS)/faults.json
test-faults: $(VENV)/installed-dev
	@mkdir -p $(dir $(FAULTS_JSON))
	$(BIN)/python -m tests.faults --seed $(SEED) --faults $(FAULTS) --json $(FAULTS_JSON) \
	  $(if $(SCENARIO),--scenario $(SCENARIO))

test-cluster: $(VENV)/installed-dev $(VENV)/moto/installed
	$(BIN)/python -m pytest tests/cluster_long.py

check: lint
	$(BIN)/python -m pytest -q tests/test_docs.py

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

coverage: $(VENV)/installed
	$(BIN)/python -m benchmarks.coverage

coord-check: $(VENV)/installed
	$(BIN)/python -m benchmarks.coord_check --out $(RUNS)/coord-check

BENCHMARKS := trainer sweep verdict checkpoints batched load
bench: $(VENV)/installed
	set -e; for name in $(BENCHMARKS); do $(BIN)/python -m benchmarks.$$name $(if $(QUICK),--quick); done
	$(BIN)/python -m benchmarks.prepare $(if $(QUICK),--megabytes 4 --usual-megabytes 2)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else \
	  f"Python {v[0]}.{v[1]}: not supported. Use 3.11, 3.12 or 3.13: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: requirements.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)/moto/installed: requirements-store.txt | $(VENV)/bin/python
	$(BIN)/python -m venv $(VENV)/moto
	$(VENV)/moto/bin/python -m pip install --quiet --disable-pip-version-check -r requirements-store.txt
	@touch $@

$(VENV)/installed-integrations: requirements-integrations.txt $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-integrations.txt
	@touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
