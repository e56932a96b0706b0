"""Log-likelihoods of text under a model: of continuations, and of documents of any length in windows.

Shapes: B requests, T tokens, D model width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.data import NOT_COUNTED
from fivefold.errors import UserError
from fivefold.kernels import matmul
from fivefold.kernels.loss import rows_at_once
from fivefold.models.base import LanguageModel
from fivefold.models.layers import Cache, Output
from fivefold.models.section import ModelSection

POOL = 8
"""Requests are sorted by length among so many batches' tokens. It bounds how many are held at once."""


@dataclass(frozen=True)
class Request:
    """tokens (n + 1) int: the last `scored` of them are scored, each given all before it. The model sees n of them.

    shared: its first tokens are also those of its neighbours, and none of them predicts a scored token. The model sees
    them once for all. cut: the beginning of the text is missing, because the model's context is shorter.
    """

    tokens: np.ndarray
    scored: int
    shared: int = 0
    cut: bool = False

    def begins_as(self, other: Request) -> bool:
        """True if both share the same first tokens."""
        return self.shared == other.shared > 0 and np.array_equal(
            self.tokens[: self.shared], other.tokens[: self.shared]
        )


class Score(NamedTuple):
    """log_p: the sum over the scored tokens, in nats. greedy: each of them is the likeliest, so greedy decoding would
    write them."""

    log_p: float
    greedy: bool


def windows(tokens: np.ndarray, context: int, stride: int) -> Iterator[Request]:
    """Requests that score each token of a document once, except the first, which only begins it (n + 1 tokens).

    The first window scores `context` tokens. Every further one scores the next `stride` tokens. Its input has `context`
    tokens, too: those before the scored ones come again. The last window scores what is left, also with a whole context
    to see. With stride = context this is the rule of lm-evaluation-harness 0.4.13 (lm_eval/utils.py,
    get_rolling_token_windows with context_len = 1).
    """
    n = len(tokens) - 1
    done = min(context, n)
    if done:
        yield Request(tokens[: done + 1], done)
    while done < n:
        new = min(stride, n - done)
        done += new
        yield Request(tokens[done - context : done + 1], new, cut=True)


def score(
    module: LanguageModel, model: ModelSection, requests: Iterable[Request], batch_tokens: int
) -> Iterator[tuple[Request, Score]]:
    """Each request with its score, in the order of the requests.

    A batch has at most `batch_tokens` tokens, shared ones and padding included; a longer request is a batch of its own.
    Requests of about the same length share a batch. The same requests give the same batches, and so the same bits.

    Raises:
        UserError: the model's output is not finite.
    """
    pool: list[Request] = []
    size = 0
    for request in requests:
        pool.append(request)
        size += len(request.tokens)
        if size >= POOL * batch_tokens:
            yield from zip(pool, _score_pool(module, model, pool, batch_tokens), strict=True)
            pool, size = [], 0
    yield from zip(pool, _score_pool(module, model, pool, batch_tokens), strict=True)


def _score_pool(
    module: LanguageModel, model: ModelSection, pool: list[Request], batch_tokens: int
) -> list[Score]:
    """In evaluation mode, with an output layer that returns scores."""
    scores, usual, was_training = dict[int, Score](), module.output, module.training
    module.output = _Scores()
    module.eval()
    try:
        for batch in _batches(pool, batch_tokens):
            scores.update(zip(batch, _score_batch(module, model, [pool[i] for i in batch]), strict=True))
    finally:
        module.output = usual
        module.train(was_training)
    return [scores[i] for i in range(len(pool))]


def _batches(pool: Sequence[Request], batch_tokens: int) -> Iterator[list[int]]:
    """Numbers of the requests of each batch. All of a batch share as many tokens, and those with the same ones are
    neighbours."""
    group = list(accumulate((not b.begins_as(a) for a, b in pairwise(pool)), initial=0))
    longest = [0] * (group[-1] + 1) if pool else []
    for number, request in zip(group, pool, strict=False):
        longest[number] = max(longest[number], len(request.tokens) - 1)
    order = sorted(range(len(pool)), key=lambda i: (pool[i].shared, -longest[group[i]], i))
    for _, alike in groupby(order, key=lambda i: pool[i].shared):
        left = list(alike)
        while left:
            rows = max(1, batch_tokens // longest[group[left[0]]])
            yield left[:rows]
            left = left[rows:]


@torch.no_grad()
def _score_batch(module: LanguageModel, model: ModelSection, batch: list[Request]) -> list[Score]:
    """Behind a shorter request stands padding, which no token before it sees."""
    shared = batch[0].shared
    B, T = len(batch), max(len(request.tokens) for request in batch) - 1 - shared
    inputs, targets = np.zeros((B, T), np.int64), np.full((B, T), NOT_COUNTED, np.int64)
    for row, request in enumerate(batch):
        n = len(request.tokens) - 1 - shared
        inputs[row, :n] = request.tokens[shared:-1]
        targets[row, n - request.scored : n] = request.tokens[-request.scored :]
    device = next(module.parameters()).device
    cache = _seen(module, model, batch, shared + T) if shared else None
    found_2N = module(torch.from_numpy(inputs).to(device), torch.from_numpy(targets).to(device), cache).cpu()
    if not found_2N.isfinite().all():
        raise UserError("cannot evaluate: the model's output is not finite (its training has diverged)")
    parts = found_2N.double().split([request.scored for request in batch], dim=1)
    return [Score(part[0].sum().item(), bool(part[1].all())) for part in parts]


def _seen(module: LanguageModel, model: ModelSection, batch: list[Request], capacity: int) -> Cache:
    """The cache of the tokens that requests share, a row for each request."""
    rows = list(accumulate((not b.begins_as(a) for a, b in pairwise(batch)), initial=0))
    firsts = [batch[rows.index(number)] for number in range(rows[-1] + 1)]
    shared, weight = batch[0].shared, next(module.parameters())
    cache = Cache(model, batch=len(firsts), capacity=shared, dtype=weight.dtype, device=weight.device)
    prefixes = np.stack([request.tokens[:shared] for request in firsts]).astype(np.int64)
    module(torch.from_numpy(prefixes).to(weight.device), cache=cache)
    return cache.rows(rows, capacity)


class _Scores(Output):
    """Output layer that scores each target by itself: (2, N) fp32, its log-probability and 1 where it is the likeliest,
    of the N targets that count, in their order. Logits exist in chunks, and only of these N positions. Without targets
    it does nothing."""

    def forward(
        self, x_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor | None, bias_V: Tensor | None = None
    ) -> Tensor:
        if targets_BT is None:
            return x_BTD
        counted_BT = targets_BT >= 0
        x_ND, targets_N = x_BTD[counted_BT], targets_BT[counted_BT]
        found_2N = torch.empty(2, len(targets_N), device=x_ND.device)
        rows = max(1, rows_at_once(x_ND, len(weight_VD)))
        for start in range(0, len(targets_N), rows):
            part = slice(start, start + rows)
            logits_nV = matmul.linear(x_ND[part], weight_VD, bias_V).float()
            target_n1 = targets_N[part, None]
            found_2N[0, part] = logits_nV.gather(1, target_n1)[:, 0] - logits_nV.logsumexp(1)
            found_2N[1, part] = (logits_nV.argmax(1) == target_n1[:, 0]).float()
        return found_2N
