"""gpt-oss as data: see module.py for the paper. No torch."""

from __future__ import annotations

from fivefold.models.moe import card as moe
from fivefold.models.operations import Matmul, Operation, Program, Sizes
from fivefold.sharding.parts import Shape


class Card(moe.Card):
    summary = "moe with sinks in attention, sliding windows, biases, clamped gates"
    attention_biases = False
    qkv_biased = windows = patterned = sinks = True

    def attention(self) -> dict[str, Shape]:
        return {"sink_bias": (self.model.heads,)} | super().attention()

    def feed_forward(self, number: int) -> dict[str, Shape]:
        found = super().feed_forward(number)
        if not self.is_mixed(number):
            return found
        E, F = self.model.experts or 0, self.model.expert_ffn_dim or 0
        own: dict[str, Shape] = {"down_bias": (E, self.model.dim)}
        for name, shape in found.items():
            own[name] = shape
            if name == "router.weight":
                own["router.logit_bias"] = (E,)
            elif name == "experts.down":
                own["experts.gate_up_bias"] = (E, 2 * F)
        return own

    def feed_forward_operations(self, s: Sizes, program: Program, number: int) -> list[Operation]:
        """With passes over rows for the biases of gate and up, and a product for those of results."""
        ops = super().feed_forward_operations(s, program, number)
        if not self.is_mixed(number):
            return ops
        first = next(i for i, op in enumerate(ops) if op.name == "experts gate")
        up = next(op.matmul for op in ops if op.name == "experts up")
        assert up is not None
        passed = up.count * up.m * up.n * s.e
        ops.insert(first, Operation("experts' biases", forward=3 * passed, backward=passed, part="gate"))
        D, E = self.model.dim, self.model.experts or 0
        biases = Operation("biases of results", Matmul(s.n, D, E), forward=3 * s.n * D * s.e)
        last = next(i for i, op in enumerate(ops) if op.name == "combine")
        return [*ops[: last + 1], biases, *ops[last + 1 :]]
