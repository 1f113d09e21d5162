"""Decoding: one target runner, one acceptance rule, one file per schedule."""

from .build import METHODS
from .engine import decode
from .types import RequestResult, Round

__all__ = ["METHODS", "RequestResult", "Round", "decode"]
