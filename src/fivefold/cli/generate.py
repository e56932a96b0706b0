"""`fivefold generate RUN`: samples text from a trained model."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fivefold.cli.options import JsonOption, RunArgument, StepOption, print_json, require_run
from fivefold.errors import printable

EXAMPLES = [
    "fivefold generate runs/first --prompt 'def main('",
    "fivefold generate runs/first --prompt 'ROMEO:' --max-tokens 400 --temperature 0.7 --top-k 50",
]


def generate(
    run: RunArgument,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="Prompt.", show_default=False)] = "",
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Maximum number of new tokens.")] = 200,
    temperature: Annotated[float, typer.Option(metavar="X", help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_k: Annotated[
        int, typer.Option(metavar="K", help="Sample from the K likeliest tokens; 0: from all.")
    ] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample from the likeliest tokens with total probability P.")
    ] = 1.0,
    seed: Annotated[
        int, typer.Option(metavar="N", help="Random seed; the same seed gives the same text.")
    ] = 0,
    step: StepOption = None,
    json: JsonOption = False,
) -> None:
    """Generate text with a trained model."""
    require_run(run, look=False)
    from fivefold.checkpoint import store
    from fivefold.train.generate import Sampling, generate_text, open_run, require_tokenizer

    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    module, recipe, tokenizer = open_run(run, checkpoint=store.chosen(run, step))
    tokenizer = require_tokenizer(run, tokenizer)
    pieces = generate_text(module, recipe.model, tokenizer, prompt, sampling)
    if json:
        print_json({"prompt": prompt, "text": "".join(pieces)})
        return
    show = printable if sys.stdout.isatty() else str  # a terminal would obey escape codes that a model writes
    print(show(prompt), end="", flush=True)
    for piece in pieces:
        print(show(piece), end="", flush=True)
    print()
