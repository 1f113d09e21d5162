"""One answer in the terminal, as it grows."""

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from .decoding import RequestResult
from .decoding.requests import Request


def figures(request: Request | RequestResult) -> str:
    """Tokens, τ, and tokens a second without prefill."""
    committed, rounds = sum(r.committed for r in request.rounds), len(request.rounds)
    tau = f"{committed / rounds:.2f}" if rounds else "-"
    speed = f"{committed / request.decode_s:.1f}" if request.decode_s else "-"
    return f"{len(request.token_ids)} tokens, τ {tau}, {speed} tokens/s"


class Stream:
    """Writes an answer to stdout as it grows. Characters that are still incomplete are held back."""

    def __init__(self, tokenizer):
        self.tokenizer, self.text, self.written = tokenizer, "", 0

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.show(self.text[self.written :] + "\n")

    def on_round(self, index: int, request: Request) -> None:
        """Take the tokens committed so far."""
        self.text = self.tokenizer.decode(
            request.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        stable = len(self.text.rstrip("\ufffd"))
        if stable > self.written:
            new, self.written = self.text[self.written : stable], stable
            self.show(new)

    def show(self, new: str) -> None:
        """Write more text."""
        sys.stdout.write(new)
        sys.stdout.flush()


class LiveStream(Stream):
    """The same on a terminal, over a status line. Finished lines scroll; the line in progress is redrawn."""

    def __init__(self, tokenizer):
        super().__init__(tokenizer)
        self.console, self.line = Console(), ""
        self.live = Live(console=self.console, auto_refresh=False, transient=True, vertical_overflow="visible")

    def __enter__(self):
        self.live.start()
        return self

    def __exit__(self, *error):
        self.show(self.text[self.written :])
        self.live.stop()
        self.print(self.line)

    def on_round(self, index: int, request: Request) -> None:
        super().on_round(index, request)
        self.live.update(Group(Text(self.line), Text(figures(request), style="dim")), refresh=True)

    def show(self, new: str) -> None:
        *finished, self.line = (self.line + new).split("\n")
        for line in finished:
            self.print(line)

    def print(self, line: str) -> None:
        """A finished line, above the status."""
        self.console.print(line, markup=False, highlight=False, emoji=False, soft_wrap=True)
