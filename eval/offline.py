"""Greedy decoding replayed on answers that are known already: which drafts every round would have made, without caches,
links or kernels. An independent check of the decoders, and a quick way to measure many settings.

    python -m eval.offline --config recipes/NAME.yaml --output FILE.json [--taps '[0,3,4]'] [--guesses '[0,4]']

decodes the recipe's benchmarks autoregressively once (greedy), replays DSpark, its checkpoint untuned in DPara mode and the
M-DFlash drafter under every pair of taps and guesses on those answers, and writes each one's acceptance length and its share of
DSpark's. `--variants '[a,b]'` replays several finetunes; `--live 20` decodes that many requests live and counts equal ones.

Under greedy decoding a round's outcome follows from the answer alone: r is how far the draft agrees with it. What the next
draft sees (features < p, the accepted tokens, what is in flight of them, the bonus where it was guessed) is read off the
answer's own pass. Shape legend: mdflash/drafter/tree.py.
"""

import copy
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from mdflash import MDFlashModel, RequestResult, Target, decode, load_drafter
from mdflash.chat import Chat
from mdflash.decoding.build import check_method
from mdflash.decoding.drafter_runner import alternatives_as_guesses, guess_bonuses
from mdflash.decoding.fast import why_not_fast
from mdflash.decoding.types import Round
from mdflash.drafter import Layout, Rows
from mdflash.drafter.backbone import ContextKV
from mdflash.drafter.sampling import Sampling
from mdflash.recipe import EvalSection, Recipe, Stage, read_recipe, require
from mdflash.target.target import check_pair
from mdflash.training.checkpoints import write_whole

from .benchmarks import load
from .run import check_settings, checkpoint, load_recipe_target, provenance
from .statistics import Record, summarise, tau_ratio

BEYOND_THE_END = -1
GUESS_SOURCES = ("spine", "draft")
CROWDED = 0.75  # texts that are through leave the pass when fewer than this share go on


@dataclass(frozen=True)
class Setting:
    """What a round's draft may know. serial: every feature and the bonus (DSpark). in_flight_taps, guesses (its
    `bonus_guesses`), guess_source: see `Deployment`.
    bonus_known: an oracle that always guesses right."""

    serial: bool = False
    in_flight_taps: int = 0
    guesses: int = 0
    bonus_known: bool = False
    guess_source: str = "spine"


@torch.no_grad()
def replay(
    target: Target, drafter: MDFlashModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]],
    settings: Sequence[Setting],
) -> list[list[list[Round]]]:  # fmt: skip
    """The rounds of every setting and text (all texts at once). answers: greedy ones, the prefill's token first; target and
    drafter are on one device."""
    return [Texts(target, drafter, prompts, answers).rounds(setting) for setting in settings]


class Texts:
    """The answers' ids and projected features, and where each text stands."""

    def __init__(
        self, target: Target, drafter: MDFlashModel, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ):
        self.drafter, d, device = drafter, drafter.draft_length, target.device
        texts = [torch.tensor([*prompt, *answer]) for prompt, answer in zip(prompts, answers, strict=True)]
        self.begin = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.end = torch.tensor([len(text) for text in texts], device=device)
        ids = pad_sequence(texts, batch_first=True).to(device)
        self.features = target.features(ids, drafter.config.target_layer_ids).to(drafter.dtype)
        self.context = drafter.project_context(self.features, torch.arange(ids.shape[1], device=device).expand_as(ids))
        behind = torch.arange(ids.shape[1] + d + 2, device=device)
        padded = torch.nn.functional.pad(ids, (0, d + 2))
        self.ids = torch.where(behind < self.end[:, None], padded, BEYOND_THE_END)

    def rounds(self, setting: Setting) -> list[list[Round]]:
        """Every text's rounds."""
        texts, d, found = self, self.drafter.draft_length, [[] for _ in self.ids]
        p, rounds, cold = self.begin, found, True
        guessed = torch.zeros_like(p, dtype=torch.bool)
        draft, others = self._serial(p, setting)
        while (going := p + 1 < texts.end).any():
            if going.float().mean() < CROWDED:
                texts, rounds = texts.only(going), [mine for mine, on in zip(rounds, going.tolist(), strict=True) if on]
                p, draft, guessed, others = (None if x is None else x[going] for x in (p, draft, guessed, others))
                going = going[going]
            row = torch.arange(len(p), device=p.device)
            truth = texts.ids[
                row[:, None], (p[:, None] + torch.arange(1, d + 2, device=p.device)).clamp(max=self._last)
            ]
            accepted = (draft == truth[:, :d]).long().cumprod(1).sum(1)
            bonus, after = truth[row, accepted], p + accepted + 1
            committed = torch.minimum(accepted + 1, texts.end - 1 - p)
            told = zip(*(x.tolist() for x in (going, accepted, draft, bonus, committed, guessed)), strict=True)
            for mine, (live, r, proposed, b, count, hit) in zip(rounds, told, strict=True):
                if live:
                    mine.append(Round(r, tuple(proposed), b, count, cold_start=cold, guessed=hit))
            block = torch.cat([texts.ids[row, p.clamp(max=self._last)][:, None], draft], 1)
            if setting.serial:
                draft, others = texts._serial(after, setting)
            else:
                draft, others, guessed = texts._branch(setting, p, block, others, accepted, bonus.clamp(min=0))
            p, cold = torch.where(going, after, p), False
        return found

    def only(self, chosen: Tensor) -> "Texts":
        """The texts of a mask [B]."""
        some = copy.copy(self)
        some.begin, some.end, some.ids, some.features = (
            x[chosen] for x in (self.begin, self.end, self.ids, self.features)
        )
        some.context = [ContextKV(layer.key[chosen], layer.value[chosen]) for layer in self.context]
        return some

    @property
    def _last(self) -> int:
        return self.ids.shape[1] - 1

    def _serial(self, p: Tensor, setting: Setting) -> tuple[Tensor, Tensor | None]:
        """The k = 0 window at p, its first token known: its draft and that one's alternatives."""
        row = torch.arange(len(p), device=p.device)
        first = self.ids[row, p.clamp(max=self._last)].clamp(min=0)
        rows, hidden = self._pass(Layout.serial(self.drafter.draft_length), p, first[:, None, None][..., :0], first, 0)
        return self._draft(rows.branches(hidden)[:, 0, 0], first, setting)

    def _branch(
        self, setting: Setting, p: Tensor, block: Tensor, others: Tensor | None, accepted: Tensor, bonus: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The draft of branch r of the tree at p, its alternatives, and whether its first slot carried the bonus. others: the
        alternatives of the block's own draft."""
        d, mask, row = (
            self.drafter.draft_length,
            self.drafter.config.mask_token_id,
            torch.arange(len(p), device=p.device),
        )
        anchors, taps = block.clamp(min=0)[:, None], setting.in_flight_taps
        knows = torch.full_like(p, setting.bonus_known, dtype=torch.bool)
        if others is not None:
            knows = (alternatives_as_guesses(others, mask)[row, accepted] == bonus[:, None]).any(-1)
        elif setting.guesses:
            spine = self._pass(Layout.anchors(d), p, anchors, None, taps)[1]
            guesses = guess_bonuses(self.drafter, spine, block.clamp(min=0), setting.guesses)
            knows = (guesses[row, accepted] == bonus[:, None]).any(-1)
        first = torch.full((len(p), d + 1), mask, device=p.device)
        first[row, accepted] = torch.where(knows, bonus, mask)
        rows, hidden = self._pass(Layout.tree(d), p, anchors, first, taps)
        return *self._draft(rows.branches(hidden)[row, 0, accepted], bonus, setting), knows

    def _pass(self, layout: Layout, p: Tensor, anchors: Tensor, first: Tensor | None, taps: int) -> tuple[Rows, Tensor]:
        """One tree a text at p."""
        first = None if first is None else first.view(len(p), 1, -1)
        ids = layout.token_ids(anchors, self.drafter.config.mask_token_id, first)
        rows = Rows.build(layout, p[:, None], ids, taps_BN=torch.full_like(p, taps)[:, None] if taps else None)
        context = self.drafter.with_in_flight(self.context, self.features, rows) if taps else self.context
        return rows, self.drafter.forward_rows(rows, context, self.drafter.mask(rows, self.features.shape[1]))

    def _draft(self, hidden: Tensor, bonus: Tensor, setting: Setting) -> tuple[Tensor, Tensor | None]:
        named = setting.guesses if setting.guess_source == "draft" else 0
        tokens, _, others = self.drafter.head.draft(
            self.drafter.lm_head(hidden), bonus, hidden, None, Sampling(), named
        )
        return tokens, others


def comparable(rounds: Sequence[Round]) -> list[Round]:
    """Rounds without what lies past the answer's end, which a replay cannot know: the last one's r and bonus."""
    last = replace(rounds[-1], accepted=rounds[-1].committed, bonus=-1) if rounds else None
    return [*rounds[:-1], last] if rounds else []


def main(args: list[str] | None = None) -> dict:
    """Replay the grid, rewriting the output file after every drafter; returns what it holds."""
    recipe, values = read_recipe(args, __doc__.splitlines()[0], extra=arguments)
    check_values(values)
    check_settings(recipe)
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    kinds = grid(values.variants, values.taps, values.guesses, values.guess_source, values.oracle_taps)
    config_file = str(values.config[-1]) if values.config else "RECIPE.yaml"
    folders = {
        name: checkpoint(recipe if variant is None else replace(recipe, variant=variant), stage, config_file)
        for name, (stage, variant, _) in kinds.items()
    }
    by_folder = {
        folder: {name: kinds[name][2] for name in kinds if folders[name] == folder} for folder in folders.values()
    }
    drafters = {folder: load_one(recipe, folder, device) for folder in by_folder}
    target = load_recipe_target(recipe, device)
    for folder, settings in by_folder.items():
        check_pair(target, drafters[folder])
        check_drafter(drafters[folder], settings)
    reason = why_not_fast(target) if values.live and recipe.eval.runner == "fast" else None
    require(not reason, "eval.runner", "fast", f"{reason}; use auto or eager")
    asked, prompts = questions(recipe, target)
    require(values.live <= len(asked), "live", values.live, f"there are {len(asked)} requests; use a number up to that")
    output = Path(values.output)
    made = provenance("eval.offline", args) | {"recipe": recipe.name, "requests": len(asked), "replays": {}}
    answers = greedy_answers(target, prompts, recipe.eval, device)
    some = prompts[:: len(prompts) // values.live][: values.live] if values.live else []
    base: list[Record] = []
    for folder, settings in by_folder.items():
        records = replayed(target, drafters[folder], asked, prompts, answers, settings, values.at_once)
        base = base or records["dspark"]
        for name in settings:
            made["replays"][name] = asdict(settings[name]) | figures(records[name], base, recipe)
        write_whole(output, json.dumps(made, indent=1) + "\n")
        for name, setting in settings.items():
            if some and not setting.bonus_known:
                agreement = live_agreement(target, drafters[folder], some, setting, recipe.eval)
                made["replays"][name]["live"] = agreement
                write_whole(output, json.dumps(made, indent=1) + "\n")
            print(line(name, made["replays"][name]), flush=True)
    return made


def line(name: str, found: dict) -> str:
    """A replay's figures for the terminal."""
    share = found["share_of_dspark"]
    text = f"{name:32} tau {found['tau_macro']:.3f}  share {share['value']:.3f}" if share else f"{name:32} no rounds"
    live = f"  live {found['live']['equal']} of {found['live']['requests']}" if "live" in found else ""
    return text + f"  guessed {found['hit_rate']:.2f}" + live


def check_values(values) -> None:
    """What can be wrong in the command's own options before anything is loaded."""
    require(min(values.taps, default=0) >= 0, "taps", values.taps, "use counts from 0 on")
    require(
        min(values.guesses, default=0) >= -1, "guesses", values.guesses, "use counts from 0 on, or -1 to know the bonus"
    )
    require(
        values.guess_source in GUESS_SOURCES, "guess_source", values.guess_source, f"use {' or '.join(GUESS_SOURCES)}"
    )
    require(len(set(values.variants)) == len(values.variants), "variants", values.variants, "name each once")
    require(values.live >= 0, "live", values.live, "use 0 for none, or a number of requests")
    require(values.at_once > 0, "at_once", values.at_once, "use a positive number of texts")
    folder = not values.output or Path(values.output).is_dir()
    require(not folder, "output", values.output, "name a JSON file, not a folder")
    Path(values.output).parent.mkdir(parents=True, exist_ok=True)
    require(values.oracle_taps >= 0, "oracle_taps", values.oracle_taps, "use 0 for none, or a count of taps")


def check_drafter(drafter: MDFlashModel, settings: dict[str, Setting]) -> None:
    """Whether the drafter can do what is asked of it; a rank-0 one is no DSpark drafter."""
    check_method("dspark", drafter)
    taps, vocabulary = len(drafter.config.target_layer_ids), drafter.config.vocab_size
    for setting in settings.values():
        rule = f"this drafter has {taps} taps; use counts up to that"
        require(setting.in_flight_taps <= taps, "taps", setting.in_flight_taps, rule)
        rule = f"the vocabulary has {vocabulary} tokens; use a few"
        require(setting.guesses < vocabulary, "guesses", setting.guesses, rule)


def load_one(recipe: Recipe, folder: str, device: str) -> MDFlashModel:
    """A replayed drafter, a published one at its pinned revision."""
    revision = recipe.drafter.base_revision if folder == recipe.drafter.base else None
    return load_drafter(folder, recipe.eval.dtype or recipe.target.dtype, device, revision)


def arguments(parser) -> None:
    """What this command adds to a recipe's."""
    parser.add_argument("--output", type=str, required=True, help="JSON file that the figures are written to")
    parser.add_argument("--taps", type=list[int], default=[0], help="counts of taps in flight to replay")
    parser.add_argument(
        "--guesses", type=list[int], default=[0], help="counts of guessed bonuses to replay; -1 knows it"
    )
    parser.add_argument(
        "--oracle_taps", type=int, default=0, help="also with so many taps, guessing nothing and knowing it"
    )
    parser.add_argument("--guess_source", type=str, default="spine", help="where guesses come from: spine or draft")
    parser.add_argument("--variants", type=list[str], default=[], help="finetunes to replay; else the recipe's variant")
    parser.add_argument("--live", type=int, default=0, help="decode so many requests live too and compare the rounds")
    parser.add_argument("--at_once", type=int, default=1024, help="texts replayed at once; bounded by memory")


def grid(
    variants: Sequence[str],
    taps: Sequence[int],
    guesses: Sequence[int],
    source: str = "spine",
    oracle_taps: int = 0,
) -> dict[str, tuple[Stage, str | None, Setting]]:
    """The replays by name: whose drafter (a stage's; of a variant, None for the recipe's) under which setting."""
    kinds: dict[str, tuple[Stage, str | None, Setting]] = {
        "dspark": ("dspark", None, Setting(serial=True)),
        "dpara-untuned": ("dspark", None, Setting()),
    }
    for variant in variants or [None]:
        prefix = "" if variant is None else f"{variant or 'mdflash'}: "
        kinds[f"{prefix}mdflash-serial"] = "mdflash", variant, Setting(serial=True)
        for count, guess in [*product(taps, guesses), *product([oracle_taps] * bool(oracle_taps), (0, -1))]:
            known = "bonus known" if guess < 0 else f"guesses={guess}"
            setting = Setting(False, count, max(guess, 0), guess < 0, source)
            kinds[f"{prefix}dpara taps={count} {known}"] = "mdflash", variant, setting
    return kinds


def questions(recipe: Recipe, target: Target) -> tuple[list[tuple[str, str]], list[list[int]]]:
    """(benchmark, row id) and prompt of every request, benchmarks in order."""
    chat = Chat(target.tokenizer, target.stop_ids, recipe.target.thinking)
    rows = [
        (name, row) for name in recipe.eval.benchmarks for row in load(name, recipe.eval.folder, recipe.eval.requests)
    ]
    prompts = [chat.prompt([{"role": "user", "content": row.turns[0]}]) for _, row in rows]
    return [(name, row.id) for name, row in rows], prompts


def greedy_answers(target: Target, prompts: list[list[int]], settings: EvalSection, device: str) -> list[Sequence[int]]:
    """The target's own answers."""
    given = {"max_new_tokens": settings.max_new_tokens, "devices": device, "batch_size": settings.batch_size}
    return [result.token_ids for result in decode(target, None, prompts, "autoregressive", **given)]


def replayed(
    target: Target, drafter: MDFlashModel, asked: list[tuple[str, str]], prompts: list[list[int]],
    answers: list[Sequence[int]], settings: dict[str, Setting], at_once: int,
) -> dict[str, list[Record]]:  # fmt: skip
    """Records of every setting; `at_once` texts share a pass."""
    records: dict[str, list[Record]] = {name: [] for name in settings}
    for part in (slice(i, i + at_once) for i in range(0, len(asked), at_once)):
        texts = Texts(target, drafter, prompts[part], answers[part])
        for name, setting in tqdm(settings.items(), desc="replays", unit="setting"):
            found = zip(asked[part], prompts[part], answers[part], texts.rounds(setting), strict=True)
            records[name] += [record(name, *of, *one) for of, *one in found]
    return records


def live_agreement(
    target: Target, drafter: MDFlashModel, prompts: list[list[int]], setting: Setting, settings: EvalSection
) -> dict[str, int]:
    """Decode prompts live and replay those answers: of how many requests every round is the same. Exact in fp32."""
    beyond = {name: getattr(setting, name) for name in ("in_flight_taps", "guess_source")}
    given = {} if setting.serial else beyond | {"bonus_guesses": setting.guesses}
    method, devices = ("dspark" if setting.serial else "dpara"), f"{target.device},{target.device}"
    results = decode(
        target, drafter, prompts, method, settings.max_new_tokens, devices=devices, batch_size=settings.batch_size,
        runner=settings.runner, **given,
    )  # fmt: skip
    (found,) = replay(target, drafter, prompts, [result.token_ids for result in results], [setting])
    pairs = zip(results, found, strict=True)
    equal = sum(comparable(result.rounds) == comparable(rounds) for result, rounds in pairs)
    return {"requests": len(prompts), "equal": equal, "rounds": sum(map(len, found))}


def record(
    method: str, benchmark: str, row_id: str, prompt: list[int], answer: Sequence[int], rounds: list[Round]
) -> Record:
    """A replay as the statistics take it; it has no times."""
    return Record.of(
        method, benchmark, row_id, RequestResult(tuple(answer), "stop", tuple(rounds), len(prompt), 0.0, 0.0)
    )


def figures(records: list[Record], dspark: list[Record], recipe: Recipe) -> dict:
    """Acceptance lengths, the share of DSpark's, guesses that were right, and what a round commits by how many drafts the
    round before accepted (its branch)."""
    seed, found = recipe.eval.seed, summarise(records, None, recipe.eval.seed)
    drafted = found["rounds"] - found["cold_starts"]
    after: dict[int, list[int]] = {}
    for one in records:
        for r, committed in zip(one.accepted[:-1], one.committed[1:], strict=True):
            after.setdefault(r, []).append(committed)
    names = ("tau_pooled", "tau_ci95", "tau_macro", "tau_macro_ci95", "positions")
    return {
        **{name: found[name] for name in names},
        "benchmarks": {
            name: summarise([x for x in records if x.benchmark == name], None, seed)["tau_pooled"]
            for name in recipe.eval.benchmarks
        },
        "share_of_dspark": tau_ratio(records, dspark, seed),
        "hit_rate": round(found["guessed_rounds"] / drafted, 4) if drafted else 0.0,
        "tau_after_r": {r: round(sum(after[r]) / len(after[r]), 3) for r in sorted(after)},
    }


if __name__ == "__main__":
    try:
        main()
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
