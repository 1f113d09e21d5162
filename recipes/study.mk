# The study of STUDY as files that need each other. `make -j3 study` runs side by side what can, and speeds alone at the end; after an
# interruption the same command goes on: finished files stay, finetunes resume at their checkpoints. ARGS reach every command.
STUDY ?= recipes/smollm2.yaml
PAGE ?= docs/results/smollm2_135m.json
TAPS ?= [0,1,2,3,4]
ALL_TAPS ?= 5
GUESSES ?= [4,0,-1,1,2]
REPLAY_ARGS ?= --eval.max_new_tokens 256
SPEED_ARGS ?=
# grids of `make bench` that the page projects with; for a drafter of other taps than the files' none: LATENCY=
LATENCY ?= $(wildcard docs/results/in_flight_*.json)

comma := ,
space := $(subst ,, )
NAME := $(shell sed -n 's/^name: *//p' $(STUDY))
RUN := runs/$(NAME)
PARTS := results/$(NAME)
EARLY := --config recipes/variants/early.yaml --mdflash.in_flight_taps $(TAPS)
TRAIN = deepspeed --master_port $(PORT) recipes/train_mdflash.py --config $(STUDY)
EVALUATE := python -m eval.run --config $(STUDY)
REPLAY := python -m eval.offline --config $(STUDY)

# a finetune is a name and its settings; the paper's own has neither
SETTINGS_seed1 := --variant seed1 --mdflash.seed 1
SETTINGS_seed2 := --variant seed2 --mdflash.seed 2
SETTINGS_early := $(EARLY)
SETTINGS_control := --variant control --mdflash.windows serial --mdflash.train_head true
SETTINGS_head := --variant head --mdflash.train_head true
SETTINGS_independent := --variant independent --mdflash.windows independent
SETTINGS_decay := --variant decay --mdflash.slot_decay 2
SETTINGS_long := --variant long --mdflash.max_steps 2400
IDEAS ?= control head independent decay long

DSPARK := $(RUN)/dspark/training.json
PAPER := $(RUN)/mdflash/training.json
finetune = $(RUN)/mdflash-$(1)/training.json
FINETUNES := $(PAPER) $(foreach name,early seed1 seed2,$(call finetune,$(name)))
MEASURED := $(PARTS)/greedy/summary.json $(PARTS)/replay/early.json $(PARTS)/sampled/summary.json $(PARTS)/replay/seeds.json \
  $(PARTS)/replay/draft_guesses.json
OPEN := $(PARTS)/replay/unfinished
.PHONY: study study-train study-measure study-ideas study-speeds study-page

study: study-speeds  ## the study on SmolLM2-135M: answers, drafters, every measurement and their page (make -j3 study)
	$(MAKE) study-page

study-train: $(FINETUNES)  ## its answers, DSpark drafter, finetune under three seeds, and a finetune for drafting early

study-measure: $(MEASURED)  ## its acceptance lengths and offline replays

study-ideas: $(PARTS)/replay/ideas.json  ## further finetunes of it, replayed beside the paper's

study-page: setup  ## its page, made of what is measured so far
	python -m eval.study --config $(STUDY) --latency "[$(subst $(space),$(comma),$(strip $(LATENCY)))]" --output $(PAGE)

study-speeds: | $(FINETUNES) $(MEASURED)  ## its speeds, one after the other: keep the GPUs free of anything else
	@for batch in 1 8; do \
	  $(call speed,batch$$batch-temperature0,--eval.batch_size $$batch) && \
	  $(call speed,early-batch$$batch,--eval.batch_size $$batch $(EARLY) --eval.in_flight_taps auto --eval.bonus_guesses auto) || exit; done
	@for batch in 1 8; do $(call speed,batch$$batch-temperature1,--eval.batch_size $$batch --eval.temperature 1) || exit; done

speed = { test -f $(PARTS)/speed/$(1)/summary.json || (set -x; $(EVALUATE) --eval.methods [autoregressive,dspark,dpara] $(2) \
  --eval.output $(PARTS)/speed/$(1) $(SPEED_ARGS) $(ARGS)); }

$(DSPARK): | setup
	python -m data.answers --config $(STUDY) $(ARGS)
	$(TRAIN) --stage dspark $(ARGS)

$(PAPER): $(DSPARK)
	$(TRAIN) $(ARGS)

$(RUN)/mdflash-%/training.json: $(DSPARK)
	$(TRAIN) $(SETTINGS_$*) $(ARGS)

$(PARTS)/greedy/summary.json: $(PAPER)
	$(EVALUATE) --eval.output $(@D) $(ARGS)

$(PARTS)/sampled/summary.json: $(PAPER)
	$(EVALUATE) --eval.temperature 1 --eval.output $(@D) $(ARGS)

# replays are rewritten setting by setting, so an unfinished one lies apart
REPLAYED_early := $(EARLY) --taps $(TAPS) --guesses $(GUESSES) --oracle_taps $(ALL_TAPS)
REPLAYED_draft_guesses := $(EARLY) --taps $(TAPS) --guesses [4,1,2] --guess_source draft
REPLAYED_seeds := --variants '["",seed1,seed2]'
REPLAYED_ideas := --variants '["",$(subst $(space),$(comma),$(strip $(IDEAS)))]'
$(PARTS)/replay/early.json $(PARTS)/replay/draft_guesses.json: $(call finetune,early)
$(PARTS)/replay/seeds.json: $(PAPER) $(call finetune,seed1) $(call finetune,seed2)
$(PARTS)/replay/ideas.json: $(PAPER) $(foreach name,$(IDEAS),$(call finetune,$(name)))
$(PARTS)/replay/%.json:
	$(REPLAY) $(REPLAYED_$*) --output $(OPEN)/$*.json $(REPLAY_ARGS) $(ARGS)
	mv $(OPEN)/$*.json $@
