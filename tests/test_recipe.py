"""The shipped recipes parse; faults in a recipe are named."""

from pathlib import Path

import pytest

from mdflash.recipe import LORA_TARGETS, LoraSection, StageSection, read_recipe, resolved

RECIPES = sorted((Path(__file__).parents[1] / "recipes").glob("*.yaml"))
TINY = str(next(path for path in RECIPES if path.stem == "tiny"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipes_parse(path):
    recipe, _ = read_recipe(["--config", str(path)])
    assert recipe.stage == "mdflash"
    assert resolved(recipe)["drafter"]["target_layer_ids"] == recipe.drafter.target_layer_ids
    assert (path.parents[1] / recipe.mdflash.deepspeed).is_file()
    assert recipe.base_drafter == (recipe.drafter.base or f"runs/{recipe.name}/dspark")


def test_overrides_reach_their_section():
    recipe, _ = read_recipe(["--config", TINY, "--stage", "dspark", "--dspark.learning_rate", "1e-4"])
    assert recipe.settings().learning_rate == 1e-4
    assert recipe.mdflash.learning_rate != 1e-4


def test_a_variant_is_a_finetune_beside_the_others():
    early = str(Path(TINY).parent / "variants" / "early.yaml")
    recipe, _ = read_recipe(["--config", TINY, "--config", early])
    plain, _ = read_recipe(["--config", TINY])
    assert recipe.stage_dir() == plain.stage_dir().with_name("mdflash-early")
    assert recipe.results_dir == plain.results_dir.with_name(f"{plain.name}-early")
    assert recipe.answers_file == plain.answers_file
    assert recipe.base_drafter == plain.base_drafter
    assert recipe.mdflash.in_flight_taps == [0, 1, 2, 3, 4]
    assert recipe.mdflash.learning_rate == plain.mdflash.learning_rate


def test_adapters_are_off_unless_named():
    assert read_recipe(["--config", TINY])[0].mdflash.lora is None
    recipe, _ = read_recipe(["--config", TINY, "--mdflash.lora.r", "8"])
    assert recipe.mdflash.lora == LoraSection(r=8)
    assert resolved(recipe)["mdflash"]["lora"]["targets"] == list(LORA_TARGETS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mdflash.lr", "1"], "--mdflash.lr"),
        (["--mdflash.micro_batch_size", "0"], "micro_batch_size=0"),
        (["--mdflash.learning_rate", "fast"], "learning_rate"),
        (["--stage", "ddtree"], "stage"),
        (["--target.dtype", "int4"], "target.dtype='int4'"),
        (["--target.path", ""], "target.path"),
        (["--name", "a/b"], "name='a/b'"),
        (["--mdflash.lora", "{targets: [q_proj, lm_head]}"], "lora.targets=['lm_head']"),
        (["--mdflash.lora", "{targets: [embed_tokens]}"], "choose from q_proj, k_proj"),
        (["--mdflash.lora", "{targets: [markov_head.gate_proj]}"], "lora.targets=['markov_head.gate_proj']"),
        (["--mdflash.lora", "{targets: [confidence_head]}"], "lora.targets=['confidence_head']"),
        (["--mdflash.lora", "{targets: []}"], "lora.targets=[]"),
        (["--mdflash.lora.r", "0"], "lora.r=0"),
        (["--mdflash.lora", "{rank: 8}"], "rank"),
        (["--dspark.lora", "{r: 8}"], "set mdflash.lora"),
        (["--dspark.known_bonus", "0.5"], "dspark.known_bonus"),
        (["--mdflash.in_flight_taps", "[1, 1]"], "in_flight_taps=[1, 1]"),
        (["--mdflash.in_flight_taps", "[]"], "in_flight_taps=[]"),
        (["--mdflash.known_bonus", "1.5"], "known_bonus=1.5"),
        (["--mdflash.spine_loss", "-1"], "spine_loss=-1"),
        (["--mdflash.slot_decay", "0"], "slot_decay=0"),
        (["--mdflash.windows", "serial", "--mdflash.serial_windows", "true"], "serial_windows=True"),
        (["--mdflash.windows", "serial", "--mdflash.in_flight_taps", "[0,1]"], "leave it at [0]"),
        (["--dspark.windows", "independent"], "dspark.windows"),
        (["--mdflash.epochs", ".inf"], "epochs=inf"),
        (["--name", ".."], "name='..'"),
        (["--mdflash.train_head", "true", "--mdflash.lora.r", "4"], "train_head=True"),
        (["--dspark.train_head", "true"], "dspark.train_head"),
        (["--variant", "a/b"], "variant='a/b'"),
        (["--eval.in_flight_taps", "some"], "in_flight_taps"),
    ],
)
def test_faults_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        read_recipe(["--config", TINY, *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_an_unknown_key_in_the_file_is_an_error(tmp_path, capsys):
    file = tmp_path / "recipe.yaml"
    file.write_text("name: x\ntarget: {path: y}\nmdflash: {learning_rte: 1}\n")
    with pytest.raises(SystemExit):
        read_recipe(["--config", str(file)])
    assert "learning_rte" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [("eval_steps", -1, "0 for never"), ("logging_steps", 0, "positive"), ("learning_rate", float("inf"), "finite")],
)
def test_a_stages_numbers_are_checked(name, value, rule):
    with pytest.raises(ValueError, match=rf"{name}={value}.*{rule}"):
        StageSection(**{name: value})


def test_a_bad_deepspeed_json_is_named(tmp_path):
    with pytest.raises(ValueError, match="nope.json'?: no such file; run from the checkout's root"):
        _ = StageSection(deepspeed="nope.json").zero_stage
    (tmp_path / "bad.json").write_text("{bad")
    with pytest.raises(ValueError, match="bad.json' is no JSON object"):
        _ = StageSection(deepspeed=str(tmp_path / "bad.json")).zero_stage
    assert StageSection(deepspeed=None).zero_stage == 0
