"""Decoding: one target runner, one acceptance rule, one file per schedule."""

from .engine import METHODS, decode
from .types import RequestResult, Round

__all__ = ["METHODS", "RequestResult", "Round", "decode"]
