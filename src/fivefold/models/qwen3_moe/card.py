"""Qwen3's mixture of experts as data: see qwen3/module.py for the paper. No torch."""

from fivefold.models.moe import card as moe
from fivefold.models.qwen3 import card as qwen3


class Card(qwen3.Card, moe.Card):
    summary = "qwen3 with a mixture of experts for feed-forward"
