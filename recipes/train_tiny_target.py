"""Train a tiny Qwen3 chat model and its tokenizer on generated texts: a target without GPU or download.

    python recipes/train_tiny_target.py --texts demo/texts.jsonl --output demo/target

Shapes: B texts, N tokens (padded on the right), V vocabulary.
"""

import dataclasses
import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from jsonargparse import auto_cli
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from tqdm import trange
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    get_cosine_schedule_with_warmup,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")  # ids 0, 1, 2, 3
PAD_ID, _, EOS_ID, MASK_ID = range(len(SPECIAL_TOKENS))
CONTEXT = 1024  # tokens
CHAT_TEMPLATE = (  # ChatML; `enable_thinking` is accepted like any argument, but this model never thinks
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    """Where to read and write, and what the trained target follows from."""

    texts: Path
    """JSONL file whose rows have `messages`, the last of them the answer."""
    output: Path
    """Folder for the model, its tokenizer and recipe.json."""
    steps: int = 750
    """Optimizer steps."""
    batch_size: int = 12
    """Texts per step."""
    learning_rate: float = 3e-3
    """Peak of the linear warm-up and cosine decay."""
    warmup_steps: int = 50
    """Steps until the peak."""
    vocab_size: int = 850
    """Most tokens that the byte-level BPE may have, special tokens included."""
    layers: int = 4
    """Decoder layers."""
    hidden_size: int = 128
    """Width of the model; heads have 32 dimensions, two query heads share a key-value head."""
    held_out: int = 48
    """Texts at the end of the file that are not trained on and measure accuracy."""
    seed: int = 0
    """Initial weights and order of the texts."""
    threads: int = min(4, os.cpu_count() or 1)
    """CPU threads; more than a few slow so small a model down."""

    def __post_init__(self):
        smallest_values = {
            "steps": 1,
            "batch_size": 1,
            "layers": 1,
            "held_out": 1,
            "threads": 1,
            "vocab_size": 260,
        }
        for name, smallest in smallest_values.items():
            if getattr(self, name) < smallest:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {smallest}; pass a larger --{name}")
        if self.hidden_size < 64 or self.hidden_size % 64:
            raise ValueError(f"hidden_size={self.hidden_size} must be a multiple of 64; try --hidden_size 128")


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over `texts`; the special tokens come first, so their ids never change."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        mask_token=SPECIAL_TOKENS[MASK_ID],
        extra_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def build_model(settings: Settings, vocab_size: int) -> Qwen3ForCausalLM:
    """Fresh Qwen3 weights in fp32, about 0.9M with the default settings."""
    torch.manual_seed(settings.seed)  # transformers initialises from the global generator
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=settings.hidden_size,
            intermediate_size=3 * settings.hidden_size,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.hidden_size // 32,
            num_key_value_heads=settings.hidden_size // 64,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            initializer_range=0.06,  # 0.02 is too small for this width: copying is learned much later
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=EOS_ID,
            pad_token_id=PAD_ID,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    return model


def batches(lengths: list[int], settings: Settings) -> Iterator[list[int]]:
    """Yield the texts of each step as indices: a new order each epoch, texts of like length side by side."""
    epoch = 0
    while True:
        rng = random.Random(f"{settings.seed}/{epoch}")
        order = rng.sample(range(len(lengths)), len(lengths))
        pool = 32 * settings.batch_size
        epoch_batches = []
        for start in range(0, len(order), pool):
            near = sorted(order[start : start + pool], key=lengths.__getitem__)
            epoch_batches += [near[i : i + settings.batch_size] for i in range(0, len(near), settings.batch_size)]
        rng.shuffle(epoch_batches)
        yield from epoch_batches
        epoch += 1


def train(model: Qwen3ForCausalLM, texts: list[list[int]], settings: Settings) -> float:
    """Fit prompts and answers alike; return the mean loss (nats per token) of the last 50 steps."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.01, fused=True
    )
    scheduler = get_cosine_schedule_with_warmup(optimizer, settings.warmup_steps, settings.steps)
    stream = batches([len(text) for text in texts], settings)
    losses = []
    model.train()
    for _ in (progress := trange(settings.steps, desc="target", unit="step")):
        tokens_BN = pad_sequence([torch.tensor(texts[i]) for i in next(stream)], True, PAD_ID)
        logits_BNV = model(input_ids=tokens_BN[:, :-1]).logits  # causal, so padding on the right needs no mask
        loss = F.cross_entropy(logits_BNV.flatten(0, 1), tokens_BN[:, 1:].flatten(), ignore_index=PAD_ID)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    model.eval()
    return sum(losses[-50:]) / len(losses[-50:])


@torch.inference_mode()
def accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, texts: list[list[dict]]) -> float:
    """Share of texts whose greedy answer ends in the written result (its wording may differ)."""
    prompts = [tokenizer.apply_chat_template(text[:-1], tokenize=False, add_generation_prompt=True) for text in texts]
    inputs = tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt", return_token_type_ids=False)
    output_BN = model.generate(**inputs, max_new_tokens=128, do_sample=False)
    answers = tokenizer.batch_decode(output_BN[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    written = [text[-1]["content"] for text in texts]
    return sum(result(ours) == result(theirs) for ours, theirs in zip(answers, written, strict=True)) / len(texts)


def result(answer: str) -> str | None:
    """The last number of an answer."""
    return next(iter(re.findall(r"\d+", answer)[::-1]), None)


def main(settings: Settings) -> None:
    """Train tokenizer and target; do nothing where the output already holds the same training, complete."""
    texts, output = settings.texts, settings.output
    training_settings = dataclasses.asdict(settings)
    for elsewhere in ("texts", "output", "threads"):
        del training_settings[elsewhere]
    recipe = {"settings": training_settings, "texts": sha256(texts)}
    if is_complete(output, recipe):
        print(f"{output}: up to date")
        return
    if output.exists() and any(output.iterdir()) and not (output / "recipe.json").exists():
        raise ValueError(f"output={output} holds something else; choose an empty folder or delete it")
    torch.set_num_threads(settings.threads)

    conversations = [json.loads(line)["messages"] for line in texts.read_text().splitlines()]
    if len(conversations) <= settings.held_out:
        raise ValueError(
            f"held_out={settings.held_out} leaves none of the {len(conversations)} texts to train on; "
            "generate more texts or pass a smaller --held_out"
        )
    training, held_out = conversations[: -settings.held_out], conversations[-settings.held_out :]
    strings = [string for text in training for message in text for string in message.values()]
    tokenizer = train_tokenizer(strings, settings.vocab_size)
    model = build_model(settings, len(tokenizer))
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens, {tokenizer.mask_token} is {MASK_ID}")
    loss = train(model, tokenizer(tokenizer.apply_chat_template(training, tokenize=False)).input_ids, settings)

    partial, replaced = (output.with_name(f"{output.name}.{state}") for state in ("partial", "replaced"))
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    recipe["files"] = {file.name: sha256(file) for file in sorted(partial.iterdir())}
    (partial / "recipe.json").write_text(json.dumps(recipe, indent=2) + "\n")
    if output.exists():
        output.rename(replaced)
    partial.rename(output)  # a whole folder appears at once, never half of it
    shutil.rmtree(replaced, ignore_errors=True)

    exact = accuracy(model, tokenizer, held_out)
    print(f"{output}: train loss {loss:.3f}, {exact:.0%} of {len(held_out)} held-out answers reach the right result")


def is_complete(output: Path, recipe: dict) -> bool:
    """Whether recipe.json states this recipe, and every file it names is as it says."""
    try:
        written = json.loads((output / "recipe.json").read_text())
        files = written.pop("files")
        return written == recipe and all(sha256(output / name) == digest for name, digest in files.items())
    except (FileNotFoundError, json.JSONDecodeError, KeyError):
        return False


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    main(auto_cli(Settings, as_positional=False))
