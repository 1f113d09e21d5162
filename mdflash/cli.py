"""The console script `mdflash`: generate, serve, plan, train, export, push, show-sample. Heavy imports wait for the command."""

import argparse
import contextlib
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

    from .chat import Sample
    from .recipe import Recipe

TRAINER = Path("recipes/train_mdflash.py")


class Parser(argparse.ArgumentParser):
    """One line for a faulty command line, and no guessing of shortened options."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, **kwargs)

    def error(self, message: str):
        self.exit(2, f"error: {message} (see `{self.prog} --help`)\n")


def main(args: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, or 2 after a line `error: ...`."""
    args = list(sys.argv[1:] if args is None else args)
    commands = "\n".join(f"  {name:<12} {command.__doc__.splitlines()[0]}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="mdflash",
        usage="mdflash COMMAND [options]",
        description="M-DFlash drafters: decode with them, train, export and publish them.",
        epilog=f"commands (each has its own --help):\n{commands}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", help="what to do", metavar="COMMAND", choices=list(COMMANDS))
    name = parser.parse_args(args[:1]).command
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")  # a terminal without UTF-8 shows "?" where it cannot show a character
    try:
        return COMMANDS[name](args[1:]) or 0
    except (ValueError, OSError, RuntimeError) as error:
        print("error: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def parse(parser: Parser, args: list[str]) -> tuple[argparse.Namespace, "Recipe | None"]:
    """The command's own arguments, and the recipe of --config (several: later ones override) with whatever `--key value`
    overrides are left."""
    text = "a recipe YAML; `--key value` overrides one of its settings, and so does a further --config"
    parser.add_argument("--config", action="append", default=[], help=text)
    own, rest = parser.parse_known_args(args)
    if not own.config:
        if rest:
            parser.error(f"unrecognized arguments: {shlex.join(rest)}")
        return own, None
    from .recipe import read_recipe

    for file in own.config:
        if not Path(file).is_file():
            raise FileNotFoundError(f"--config {file}: no such file; name a recipe YAML")
    return own, read_recipe([*(part for file in own.config for part in ("--config", file)), *rest])[0]


def generate(args: list[str]) -> None:
    """Answer one prompt, streaming the text with live τ and tokens/s."""
    parser = Parser(prog="mdflash generate", description=generate.__doc__)
    parser.add_argument("--target", help="folder or hub id of the target")
    parser.add_argument("--drafter", help="folder or hub id of the drafter")
    parser.add_argument("--prompt", help="one user turn; without it the prompt is read from stdin")
    parser.add_argument("--method", default="dpara", help="autoregressive, dspark, dflash or dpara (default)")
    parser.add_argument("--max_new_tokens", type=int, default=512, help="token budget of the answer (default 512)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 (default) is greedy")
    parser.add_argument("--top_p", type=float, default=1.0, help="nucleus mass (default 1)")
    parser.add_argument("--top_k", type=int, default=0, help="tokens kept; 0 (default) keeps all")
    parser.add_argument("--seed", type=int, default=0, help="seed of a sampled answer (default 0)")
    parser.add_argument("--devices", help="target's and drafter's, as in cuda:0,cuda:1; the default is what is there")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; the default is the recipe's, or the drafter's")
    parser.add_argument("--stop", nargs="+", default=[], metavar="TEXT", help="texts that end the answer")
    parser.add_argument("--thinking", action="store_true", help="turn the chat template's thinking mode on")
    parser.add_argument(
        "--drafter_address", help="HOST:PORT of this machine at which `mdflash serve` brings the drafter"
    )
    own, recipe = parse(parser, args)
    target_source, drafter_revision = fill_in(own, recipe) if recipe else ({}, None)
    if own.target is None:
        raise ValueError("no target: give --target or --config")
    if own.drafter is None and own.method != "autoregressive":
        raise ValueError(f"--method {own.method} needs a drafter: give --drafter or --config")
    prompt = sys.stdin.read() if own.prompt is None else own.prompt
    if not prompt.strip():
        raise ValueError("the prompt is empty: give --prompt TEXT, or text on stdin")

    from . import decode, load_drafter, load_target
    from .decoding.build import check_method
    from .decoding.deployment import default_devices, share_cores, usable_device
    from .decoding.tuning import settled
    from .live import LiveStream, Stream, figures

    devices, drafter = own.devices or default_devices(), None
    for device in devices.split(","):
        usable_device(device)
    share_cores(devices)
    if own.method != "autoregressive":
        drafter = load_drafter(own.drafter, own.dtype, devices.split(",")[-1], drafter_revision)
    check_method(own.method, drafter)  # before the larger load
    target = load_target(own.target, own.dtype or (drafter and drafter.dtype), devices.split(",")[0], **target_source)
    show = LiveStream if sys.stdout.isatty() else Stream
    with show(target.tokenizer) as stream:
        (result,) = decode(
            target,
            drafter,
            [prompt],
            own.method,
            own.max_new_tokens,
            own.temperature,
            devices=devices,
            seed=own.seed,
            top_k=own.top_k,
            top_p=own.top_p,
            stop_strings=own.stop,
            thinking=own.thinking,
            on_round=stream.on_round,
            drafter_address=own.drafter_address,
            **(recipe.eval.deployment if recipe else {}),
        )
    print(f"{figures(result)}, finish reason {result.finish_reason}", file=sys.stderr)
    for chosen in settled(drafter).values() if drafter is not None else ():
        print("auto: " + ", ".join(f"{name} {value}" for name, value in chosen.items()), file=sys.stderr)


def serve(args: list[str]) -> None:
    """Be the drafter process of one target's process, here or on another host."""
    parser = Parser(prog="mdflash serve", description=serve.__doc__)
    parser.add_argument("--drafter", required=True, help="folder or hub id of the drafter")
    parser.add_argument(
        "--address", required=True, help="HOST:PORT of the target's machine, as in its --drafter_address"
    )
    parser.add_argument("--device", help="the drafter's device; the default is the last GPU, or cpu")
    parser.add_argument("--dtype", help="float32, bfloat16 or float16; the default is the drafter's")
    parser.add_argument(
        "--timeout", type=float, default=120.0, help="seconds of silence after which to give up (default 120)"
    )
    own = parser.parse_args(args)

    from . import load_drafter
    from .decoding.deployment import default_devices, usable_device
    from .decoding.remote import parse_address
    from .decoding.remote import serve as answer

    parse_address(own.address)
    device = usable_device(own.device or default_devices().split(",")[-1])
    drafter = load_drafter(own.drafter, own.dtype, device)
    print(f"{own.drafter} on {device} waits for the target's process at {own.address}", file=sys.stderr)
    answer(drafter, own.address, own.timeout)
    print("the target's process said goodbye", file=sys.stderr)


def fill_in(own: argparse.Namespace, recipe: "Recipe") -> tuple[dict, str | None]:
    """Fill what the command line leaves open; returns how to load the target, and the drafter's revision."""
    section, source, revision = recipe.target, {}, None
    if own.target is None:
        own.target, source = section.path, {"revision": section.revision}
        source |= {"gguf_file": section.gguf_file} if section.gguf_file else {}
    if own.drafter is None:
        own.drafter, revision = recipe_drafter(recipe, own.method)
    own.dtype = own.dtype or section.dtype
    own.devices = own.devices or recipe.eval.devices
    own.thinking = own.thinking or section.thinking
    return source, revision


def recipe_drafter(recipe: "Recipe", method: str) -> tuple[str, str | None]:
    """The drafter that a method uses under a recipe, and its hub revision."""
    if method == "dspark":
        return recipe.base_drafter, recipe.drafter.base_revision if recipe.drafter.base else None
    return str(recipe.stage_dir("dflash" if method == "dflash" else "mdflash")), None


def train(args: list[str]) -> int:
    """Run recipes/train_mdflash.py under deepspeed, from the checkout's root."""
    parser = Parser(prog="mdflash train", description=train.__doc__)
    parser.add_argument("--print_only", action="store_true", help="print the command instead of running it")
    own, recipe = parse(parser, args)
    if recipe is None:
        raise ValueError("no recipe: give --config RECIPE.yaml")
    if not TRAINER.is_file():
        raise FileNotFoundError(f"{TRAINER}: no such file; run `mdflash train` from the root of the checkout")
    launcher = "deepspeed" if recipe.settings().deepspeed else "python"
    passed = [arg for arg in args if arg != "--print_only"]
    print(shlex.join([launcher, str(TRAINER), *passed]), flush=True)
    if own.print_only:
        return 0
    program = sys.executable if launcher == "python" else shutil.which(launcher)
    if program is None:
        raise FileNotFoundError(
            "deepspeed is not installed: `pip install 'mdflash[train]'`, or pass --mdflash.deepspeed null"
        )
    return subprocess.run([program, str(TRAINER), *passed]).returncode


def plan(args: list[str]) -> None:
    """Print a training stage's parameters, FLOPs, GPU memory and hours, before anything starts."""
    parser = Parser(prog="mdflash plan", description=plan.__doc__)
    parser.add_argument("--gpus", type=int, help="GPUs of the run; the default is what is here, at least 1")
    parser.add_argument("--tflops", type=float, help="bf16 matmul TFLOP/s of one GPU; the default is measured here")
    parser.add_argument(
        "--matmul_share", type=float, default=0.45, help="share of it that a step reaches (default 0.45)"
    )
    parser.add_argument("--target_config", help="the target's config.json; the default is the recipe's target")
    parser.add_argument("--length", type=int, help="tokens of a mean text; the default is the stage's max_length")
    parser.add_argument("--texts", type=int, help="training texts; the default is the answers' number, or data.limit")
    own, recipe = parse(parser, args)
    if recipe is None:
        raise ValueError("no recipe: give --config RECIPE.yaml")

    import torch
    from rich.console import Console

    from .training.plan import make_plan, show, target_config

    gpus = max(1, torch.cuda.device_count()) if own.gpus is None else own.gpus
    target = target_config(recipe, own.target_config)
    show(make_plan(recipe, target, gpus, own.tflops, own.matmul_share, own.length, own.texts), Console(highlight=False))


def export(args: list[str]) -> None:
    """Write a trained drafter as a folder to publish: weights, config.json, model card."""
    parser = Parser(prog="mdflash export", description=export.__doc__)
    parser.add_argument("--checkpoint", help="the drafter's folder; the default is the recipe's finished stage")
    parser.add_argument("--output", help="folder to write; the default is runs/NAME/export")
    parser.add_argument("--summary", help="summary.json of an evaluation; the default is results/NAME/summary.json")
    parser.add_argument("--license", default="apache-2.0", help="license in the model card (default apache-2.0)")
    own, recipe = parse(parser, args)
    if recipe is not None:
        own.checkpoint = own.checkpoint or recipe.stage_dir()
        own.output = own.output or export_dir(recipe)
        measured = recipe.results_dir / "summary.json"
        own.summary = own.summary or (measured if measured.is_file() else None)
    if not own.checkpoint or not own.output:
        raise ValueError("nothing to export: give --config, or --checkpoint and --output")

    from .drafter import hub

    folder = hub.export(own.checkpoint, own.output, own.summary, own.license)
    print(
        f"{own.checkpoint} -> {folder}"
        + (f", with the figures of {own.summary}" if own.summary else ", without figures")
    )


def push(args: list[str]) -> None:
    """Upload an exported drafter to the Hugging Face hub."""
    parser = Parser(prog="mdflash push", description=push.__doc__)
    parser.add_argument("--folder", help="an exported folder; the default is runs/NAME/export")
    parser.add_argument("--repo_id", required=True, help="owner/name on the hub")
    parser.add_argument("--revision", help="branch to push to; the default is main")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry_run", action="store_true", help="show what would be uploaded and stop")
    own, recipe = parse(parser, args)
    folder = own.folder or (recipe and export_dir(recipe))
    if folder is None:
        raise ValueError("nothing to push: give --config or --folder")

    from .drafter import hub

    address = hub.push(folder, own.repo_id, own.private, own.dry_run, own.revision)
    if address:
        print(address)


def export_dir(recipe: "Recipe") -> Path:
    """Where a recipe's exported drafter lies."""
    return recipe.run_dir / f"export{recipe.suffix}"


def show_sample(args: list[str]) -> None:
    """Show a training sample with its supervised tokens marked."""
    parser = Parser(prog="mdflash show-sample", description=show_sample.__doc__)
    parser.add_argument("--index", type=int, default=0, help="row of the answers, from 0 (default)")
    parser.add_argument("--ids", action="store_true", help="show token ids too")
    parser.add_argument("--no_color", action="store_true", help="mark supervised text as ⟦...⟧ instead of by colour")
    own, recipe = parse(parser, args)
    if recipe is None:
        raise ValueError("no recipe: give --config RECIPE.yaml")

    from rich.console import Console

    from .conversations import load_chat, read_conversations

    rows = read_conversations(recipe.answers_file)
    if not 0 <= own.index < len(rows):
        raise ValueError(
            f"--index {own.index}: {recipe.answers_file} holds rows 0..{len(rows) - 1}; choose one of them"
        )
    chat, row = load_chat(recipe.target), rows[own.index]
    samples = chat.samples(row["messages"], row["id"], recipe.settings().max_length)
    console = Console(no_color=own.no_color or None, highlight=False)
    marked = console.no_color or not console.is_terminal
    for sample in samples:
        pieces = [lambda ids: chat.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)]
        if own.ids:
            pieces.append(lambda ids: "".join(f"{token} " for token in ids))
        for to_text in pieces:
            console.print(paint(sample, to_text, marked), soft_wrap=True)
    console.print(
        f"row {own.index} of {len(rows)} ({row['id']}): "
        + ("; ".join(map(counts, samples)) or "no assistant token, nothing to learn from")
        + f"; thinking {'on' if chat.thinking else 'off'}",
        markup=False,
        soft_wrap=True,
    )


def paint(sample: "Sample", to_text: Callable[[Sequence[int]], str], marked: bool) -> "Text":
    """A sample's text (or ids) with the supervised spans in colour, or between ⟦ and ⟧ when `marked`."""
    from rich.text import Text

    text, at = Text(), 0
    for start, end in sample.spans:
        text.append(to_text(sample.ids[at:start]), style="" if marked else "dim")
        answer = to_text(sample.ids[start:end])
        text.append(f"⟦{answer}⟧" if marked else answer, style="" if marked else "bold green")
        at = end
    return text.append(to_text(sample.ids[at:]), style="" if marked else "dim")


def counts(sample: "Sample") -> str:
    """Tokens, supervised tokens and spans of a sample."""
    spans = ", ".join(f"{start}..{end - 1}" for start, end in sample.spans)
    return f"{sample.id}: {len(sample.ids)} tokens, {sample.supervised} of them supervised ({spans})"


COMMANDS = {
    "generate": generate,
    "serve": serve,
    "plan": plan,
    "train": train,
    "export": export,
    "push": push,
    "show-sample": show_sample,
}

if __name__ == "__main__":
    sys.exit(main())
