# One line per command; `make help` lists them. Every command reads a recipe: make train CONFIG=recipes/smollm2.yaml
PYTHON ?= python3
VENV ?= .venv
CONFIG ?= recipes/tiny.yaml
ARGS ?=
PORT ?= $(shell $(PYTHON) -c "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])")
BIN := $(abspath $(VENV))/bin
export PATH := $(BIN):$(PATH)
export TOKENIZERS_PARALLELISM := false
.DEFAULT_GOAL := help
.PHONY: help setup demo pipeline replay answers bootstrap train eval-acceptance export push bench bench-training test lint

help:  ## list the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "make %-16s %s\n", $$1, $$2}'
	@echo "CONFIG=recipes/NAME.yaml picks the recipe (default $(CONFIG)); ARGS='--key value' overrides its settings."

include recipes/study.mk

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
