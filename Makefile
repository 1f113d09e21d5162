# One line per command; `make help` lists them. Every command reads a recipe: make train CONFIG=recipes/smollm2.yaml
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= recipes/tiny.yaml
ARGS ?=
PORT ?= $(shell $(PYTHON) -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
export TOKENIZERS_PARALLELISM := false
EARLY := --config recipes/variants/early.yaml
# the study's recipe (its file carries the recipe's name), where its page goes, and its drafter's counts of taps
STUDY ?= recipes/smollm2.yaml
PAGE ?= docs/results/smollm2_135m.json
TAPS ?= [0,1,2,3,4]
ALL_TAPS ?= 5
PARTS := results/$(basename $(notdir $(STUDY)))
.DEFAULT_GOAL := help
.PHONY: help setup demo pipeline study study-train study-measure study-ideas replay answers bootstrap train eval-acceptance export push bench bench-training test lint

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'
	@echo "CONFIG=recipes/NAME.yaml picks the recipe (default $(CONFIG)); ARGS='--key value' overrides its settings."

setup: $(VENV)/.installed  ## make the virtual environment with the tested versions

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,dev]'
	-test -n "$$(command -v nvidia-smi)" || python -c "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load(verbose=False)" > /dev/null 2>&1
	touch $@

demo: setup  ## the whole pipeline on a tiny model, CPU only, no downloads: about 6 minutes
	python -m data.word_problems --output runs/demo/problems
	python recipes/train_tiny_target.py --texts runs/demo/problems/texts.jsonl --output runs/demo/target
	$(MAKE) pipeline CONFIG=recipes/tiny.yaml

pipeline: answers bootstrap train eval-acceptance  ## answers, DSpark bootstrap, M-DFlash finetune and evaluation of CONFIG

study: study-train study-measure  ## the study on SmolLM2-135M: answers, drafters, every measurement and their page

study-train: setup  ## its answers, DSpark drafter, finetune under three seeds, and a finetune for drafting early
	$(MAKE) answers bootstrap train CONFIG=$(STUDY)
	for seed in 1 2; do $(MAKE) train CONFIG=$(STUDY) ARGS="--variant seed$$seed --mdflash.seed $$seed $(ARGS)" || exit; done
	$(MAKE) train CONFIG=$(STUDY) ARGS="$(EARLY) $(ARGS)"

study-measure: setup  ## its acceptance lengths, offline replays and speeds, and the page made of them
	python -m eval.run --config $(STUDY) --eval.output $(PARTS)/greedy $(ARGS)
	python -m eval.run --config $(STUDY) --eval.temperature 1 --eval.output $(PARTS)/sampled $(ARGS)
	python -m eval.offline --config $(STUDY) $(EARLY) --taps $(TAPS) --guesses [0,1,2,4,-1] --oracle_taps $(ALL_TAPS) --output $(PARTS)/replay/early.json $(ARGS)
	python -m eval.offline --config $(STUDY) $(EARLY) --taps $(TAPS) --guesses [1,2,4] --guess_source draft --output $(PARTS)/replay/draft_guesses.json $(ARGS)
	python -m eval.offline --config $(STUDY) --variants '["",seed1,seed2]' --output $(PARTS)/replay/seeds.json $(ARGS)
	for batch in 1 8; do for temperature in 0 1; do \
	  python -m eval.run --config $(STUDY) --eval.methods [autoregressive,dspark,dpara] --eval.batch_size $$batch \
	    --eval.temperature $$temperature --eval.output $(PARTS)/speed/batch$$batch-temperature$$temperature $(ARGS) || exit; done; done
	for batch in 1 8; do python -m eval.run --config $(STUDY) $(EARLY) --eval.methods [autoregressive,dspark,dpara] --eval.batch_size $$batch \
	  --eval.in_flight_taps auto --eval.bonus_guesses auto --eval.output $(PARTS)/speed/early-batch$$batch $(ARGS) || exit; done
	python -m eval.study --config $(STUDY) --latency "[$$(ls docs/results/in_flight_*.json 2>/dev/null | paste -sd,)]" --output $(PAGE)

study-ideas: setup  ## further finetunes of it, replayed beside the paper's: a trained head, steeper weights, more steps; and a control
	$(MAKE) train CONFIG=$(STUDY) ARGS="--variant head --mdflash.train_head true $(ARGS)"
	$(MAKE) train CONFIG=$(STUDY) ARGS="--variant decay --mdflash.slot_decay 2 $(ARGS)"
	$(MAKE) train CONFIG=$(STUDY) ARGS="--variant long --mdflash.max_steps 2400 $(ARGS)"
	$(MAKE) train CONFIG=$(STUDY) ARGS="--variant control --mdflash.windows serial --mdflash.train_head true $(ARGS)"
	python -m eval.offline --config $(STUDY) --variants '["",head,decay,long,control]' --output $(PARTS)/replay/ideas.json $(ARGS)

replay: setup  ## replay greedy decoding of CONFIG's drafters offline: acceptance length under many settings
	python -m eval.offline --config $(CONFIG) --output results/offline_$(basename $(notdir $(CONFIG))).json $(ARGS)

answers: setup  ## let the target of CONFIG answer the prompts
	python -m data.answers --config $(CONFIG) $(ARGS)

bootstrap: setup  ## train a DSpark drafter from scratch (skip it when CONFIG names a published one)
	deepspeed --master_port $(PORT) recipes/train_mdflash.py --config $(CONFIG) --stage dspark $(ARGS)

train: setup  ## finetune the backbone into M-DFlash
	deepspeed --master_port $(PORT) recipes/train_mdflash.py --config $(CONFIG) $(ARGS)

eval-acceptance: setup  ## decode the benchmarks with every method; writes results/NAME
	python -m eval.run --config $(CONFIG) $(ARGS)

export: setup  ## write the finished drafter with its model card
	mdflash export --config $(CONFIG) $(ARGS)

push: setup  ## upload it: make push REPO=owner/name [ARGS=--dry_run]
	$(if $(REPO),,$(error push needs REPO=owner/name))
	mdflash push --config $(CONFIG) --repo_id $(REPO) $(ARGS)

bench-training: setup  ## time a training step at the shape of CONFIG's target on a GPU (random weights)
	python -m eval.training_speed --config $(CONFIG) --output results/training_$(basename $(notdir $(CONFIG))).json $(ARGS)

bench: setup  ## time the decoding rounds at the shape of CONFIG's target on one or two GPUs (random weights)
	python -m eval.decoding_speed --config $(CONFIG) --output results/decoder_$(basename $(notdir $(CONFIG))).json $(ARGS)

test: setup  ## run the tests
	python -m pytest --numprocesses 2 --dist loadfile

lint: setup  ## check style
	ruff check .
	ruff format --check .
