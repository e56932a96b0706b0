"""A mixture of experts as data: see module.py for the papers. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fivefold.models.card import Contradiction
from fivefold.models.llama import card as llama
from fivefold.models.tables import swiglu, under
from fivefold.sharding.layout import divisors
from fivefold.sharding.parts import Shape

EXPERTS = 8  # default


class Card(llama.Card):
    """Llama with a mixture as feed-forward in all blocks except the first `dense_layers`."""

    summary = "llama with a mixture of experts for feed-forward"
    words = llama.Card.words | {
        "experts_per_token": "2, or 1 if there is one expert",
        "expert_ffn_dim": "`ffn_dim`",
        "router_normalize": "true, but false with one expert per token, because a score divided by itself teaches "
        "the router nothing",
    }
    widths = (*llama.Card.widths, "expert_ffn_dim")
    has_experts = True
    shared, score, balance = 0, "softmax", "aux"
    """Defaults of `shared_experts`, `router_score` and `balance`."""

    def defaults(self) -> dict[str, Any]:
        """An expert is as wide as a dense layer. With one expert per token, scores are not normalised: a score divided
        by itself would teach the router nothing."""
        found, per_token = super().defaults(), self.per_token
        found |= {"experts": EXPERTS, "experts_per_token": per_token, "router_normalize": per_token > 1}
        found |= {"shared_experts": self.shared, "router_score": self.score, "balance": self.balance}
        return found | {"expert_ffn_dim": self.model.ffn_dim or found["ffn_dim"]}

    @property
    def buffers(self) -> dict[str, Shape]:
        """Biases of the routers, which follow the load, or the load itself."""
        kinds = ["bias"] * (self.model.balance == "bias") + ["load"] * (self.model.balance_scope == "batch")
        mixed = [number for number, experts in enumerate(self.mixed) if experts]
        return {f"blocks.{n}.mlp.router.{kind}": (self.model.experts or 0,) for n in mixed for kind in kinds}

    def resized(self, layers: int) -> dict[str, Any]:
        dense = min(self.model.dense_layers, layers - 1)
        return super().resized(layers) | {"expert_ffn_dim": None, "dense_layers": dense}

    @property
    def per_token(self) -> int:
        return self.model.experts_per_token or min(2, self.model.experts or EXPERTS)

    def expert_features(self) -> tuple[str, int]:
        name = "expert_ffn_dim" if self.model.expert_ffn_dim else "ffn_dim"
        return name, getattr(self.model, name) or 0

    def rules(self) -> Iterator[Contradiction]:
        model, experts, per_token = self.model, self.model.experts or EXPERTS, self.per_token
        if model.dense_layers and model.full_every > 1 and (model.sliding_window or self.linear_attention):
            yield (
                {"model.dense_layers", "model.full_every"},
                f"model.dense_layers = {model.dense_layers} with model.full_every = {model.full_every} makes more "
                "than two kinds of blocks. Nearest valid: dense_layers = 0",
            )
        if per_token > experts:
            yield (
                {"model.experts_per_token", "model.experts"},
                f"model.experts_per_token = {per_token} must be at most model.experts = {experts}",
            )
        if per_token == 1 and model.router_normalize:
            yield (
                {"model.router_normalize", "model.experts_per_token"},
                "model.router_normalize with model.experts_per_token = 1 divides a score by itself: the router would "
                "not learn. Nearest valid: router_normalize = false",
            )
        # Groups have equally many experts, at least the two that their score counts, and enough for a token.
        groups, used = model.expert_groups, model.groups_per_token
        if experts % groups or experts < 2 * groups > 2:
            fits = (n for n in divisors(experts) if n <= groups and (n == 1 or experts >= 2 * n))
            nearest = max(fits)
            yield (
                {"model.expert_groups", "model.experts"},
                f"model.expert_groups = {groups} must divide model.experts = {experts} into groups of two or more. "
                f"Nearest valid: expert_groups = {nearest}",
            )
        elif used > groups or used * (experts // groups) < per_token <= experts:
            least = -(-per_token // (experts // groups))
            yield (
                {"model.groups_per_token", "model.expert_groups", "model.experts_per_token"},
                f"model.groups_per_token = {used} must be at most model.expert_groups = {groups}, with at least "
                f"model.experts_per_token = {per_token} experts. "
                f"Nearest valid: groups_per_token = {min(max(used, least), groups)}",
            )
        if model.dense_layers >= model.layers:
            yield (
                {"model.dense_layers", "model.layers"},
                f"model.dense_layers = {model.dense_layers} must be less than model.layers = {model.layers}",
            )
        for name, size in (("dim", model.dim), self.expert_features()):
            if size and size % 8:
                yield (
                    {f"model.{name}"},
                    f"model.{name} = {size} must be a multiple of 8: the grouped product of experts wants rows of "
                    f"whole 16 bytes. Nearest valid: {max(8, round(size / 8) * 8)}",
                )
        chosen = model.balance or self.balance
        for name, balance in (("aux_loss_weight", "aux"), ("balance_scope", "aux"), ("balance_rate", "bias")):
            if chosen != balance and getattr(model, name) != getattr(type(model)(), name):
                yield (
                    {f"model.{name}", "model.balance"},
                    f'model.{name} needs model.balance = "{balance}", not "{chosen}"',
                )

    def is_mixed(self, number: int) -> bool:
        return number >= min(self.model.dense_layers, self.model.layers)

    def feed_forward(self, number: int) -> dict[str, Shape]:
        """With experts: router, routed experts (each SwiGLU: gate and up in one matrix, down), shared experts as one
        wide SwiGLU."""
        if not self.is_mixed(number):
            return super().feed_forward(number)
        model = self.model
        D, E, F, shared = model.dim, model.experts or 0, model.expert_ffn_dim or 0, model.shared_experts or 0
        routed: dict[str, Shape] = {
            "router.weight": (E, D),
            "experts.gate_up": (E, 2 * F, D),
            "experts.down": (E, D, F),
        }
        gate: dict[str, Shape] = {"shared_gate_vectors": (1, D)} if shared and self.gated_shared else {}
        return gate | routed | (under("shared", swiglu(D, shared * F)) if shared else {})
