"""LoRA (arXiv 2106.09685): trains low-rank adapters beside a run's frozen layers, and merges them into an export.

python examples/lora.py
"""

from torch import Tensor, nn

import fivefold


class LoRA(nn.Module):
    """base(x) + B(A(x)). B starts at zero, so training starts from the base."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base, self.lora_a = base, nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, inputs) -> (B, T, outputs)
        return self.base(x) + self.lora_b(self.lora_a(x))


def adapted(recipe: fivefold.Recipe) -> nn.Module:
    """The recipe's model, frozen, with an adapter at each linear layer of its blocks."""
    model = fivefold.build(recipe.model, device="cpu").requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name.startswith("blocks."):
            model.set_submodule(name, LoRA(layer))
    return model


def base_name(name: str) -> str:
    return name.replace(".base.", ".")


def merged(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each base plus its adapter, under the names of the recipe's model."""
    found = {}
    for name, weight in weights.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part == "base":
            weight = weight + weights[f"{layer}.lora_b.weight"] @ weights[f"{layer}.lora_a.weight"]
        if not part.startswith("lora_"):
            found[base_name(name)] = weight
    return found


if __name__ == "__main__":
    small = ["model.layers=2", "model.dim=64", "data.tokenizer=bytes", "train.val_sequences=16"]
    base = fivefold.train(fivefold.load("quickstart", [*small, "train.steps=60"]), nproc=1)
    settings = [f"train.init_from={base.path}", "checkpoint.frozen=false", "train.steps=40", "optim.lr=3e-3"]
    recipe = fivefold.load("continue", [*settings, "train.val_sequences=16"], layout="dp=2")
    run = fivefold.train(recipe, nproc=2, model=adapted(recipe), card=fivefold.ModuleCard(named=base_name))
    print(run.export("exported", merged(run.weights())))
