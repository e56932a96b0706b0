"""What test_architectures.py runs in a package that has the fifth architecture. Writes found.json."""

import json
import sys
from pathlib import Path

import torch

from fivefold.errors import UserError
from fivefold.launch.ranks import Ranks
from fivefold.models.base import build
from fivefold.models.card import card_of
from fivefold.models.hf import from_hf, from_hf_config, hf_config, to_hf
from fivefold.recipe import active_parameters, change, count_parameters, flops_per_token, load, resolve
from fivefold.recipe.rules import allows
from fivefold.sharding.layout import Layout
from fivefold.step.state import build_state
from fivefold.step.step import take_step
from fivefold_plan.cluster.clusters import parse
from fivefold_plan.messages.volume import counted
from fivefold_plan.predict import predict
from fivefold_plan.trace.depth import exact


def main(folder: Path) -> None:
    sets = ["model.arch=tiny", "model.layers=2", "model.dim=32", "model.heads=4", "model.seq_len=16"]
    sets += ["train.steps=2", "train.global_batch_size=4", "precision.mode=bf16"]
    recipe = resolve(load("quickstart", sets, "dp=1"), vocab_size=300)
    model, card = recipe.model, card_of(recipe.model)
    module = build(model, device="cpu")
    table = {name: tuple(p.shape) for name, p in module.named_parameters()}
    weights = to_hf(dict(module.named_parameters()), model)
    back = from_hf(weights, from_hf_config(hf_config(model)))
    try:
        change(recipe, ["model.rope_theta=5.0"])
        refused = ""
    except UserError as error:
        refused = str(error)
    cut = change(recipe, layout="tp=2")
    plan, dry = predict(cut, parse("h100:2")), exact(cut, kept=False)
    state = build_state(recipe, Ranks(0, 1, 0, 1, torch.device("cpu")))
    tokens = torch.arange(4 * 17).view(4, 17) * 7919 % 300
    losses = [float(take_step(state, recipe, [(tokens[:, :-1], tokens[:, 1:])]).loss) for _ in range(2)]
    found = {
        "names": list(table.items()) == list(card.parameters.items()),
        "counted": count_parameters(model)
        == active_parameters(model)
        == sum(p.numel() for p in module.parameters()),
        "flops": flops_per_token(model),
        "exchange": back.keys() == table.keys()
        and all(torch.equal(back[n], p) for n, p in module.named_parameters()),
        "tp": [tp for tp in (1, 2, 3, 4) if allows(recipe, Layout(tp=tp))],
        "refused": refused,
        "step_s": plan.as_json()["time"]["step_s"],
        "messages": counted(plan.setting) == dry.step.sent,
        "losses": losses,
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
