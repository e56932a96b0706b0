"""Evaluates a run: perplexity and bits per byte of texts, multiple choice and completions by likelihood.

Prompts, the border between context and continuation, windows and scores are those of lm-evaluation-harness 0.4.13
("lm-eval" below; its files are named where they matter), so its figures for the exported folder are the same
(benchmarks/eval_beside.py). Tasks in which the model writes freely are not supported.

Shapes: B requests, T tokens, D model width, V vocabulary, N scored tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby, islice, pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fivefold.checkpoint import store
from fivefold.data import NOT_COUNTED
from fivefold.data.chat import ChatTemplate, Message, NotAConversation
from fivefold.data.eval_docs import Item, documents, prompts, read_items, require_enough, require_readable
from fivefold.data.tokenizer import Tokenizer
from fivefold.errors import UserError
from fivefold.files import guard
from fivefold.host.machine import has_fast_bf16
from fivefold.kernels import matmul
from fivefold.kernels.matmul import rows_at_once
from fivefold.launch.ranks import device_for
from fivefold.models.base import LanguageModel
from fivefold.models.card import card_of
from fivefold.models.layers import Cache, Output
from fivefold.models.rules import having
from fivefold.models.section import ModelSection
from fivefold.precision import DTYPES, PRECISIONS, chosen, torch_dtype
from fivefold.recipe import load
from fivefold.train.generate import open_run, require_tokenizer, template_of

BATCH_TOKENS = 8192
LEAST_SHARED = 8
"""Tokens of a prompt from which on the choices of an item share one pass over it."""
COMPUTED = tuple(name for name, dtype in DTYPES.items() if dtype.stored and dtype.multiplied)
"""The dtypes in which a model can be evaluated."""
POOL = 8
"""Requests are sorted by length among so many batches' tokens. It bounds how many are held at once."""


@dataclass(frozen=True)
class Evaluation:
    """How a run is evaluated."""

    shots: int = 0
    """Solved examples in front of each item of a task."""
    shots_from: Path | str | None = None
    """Task file of the examples; None: the task's own file, without the item itself."""
    seed: int = 1234
    """Seed of the examples' choice. lm-eval's default is the same."""
    limit: int = 0
    """Number of items per task, the first ones; 0: all."""
    context: int | None = None
    """Tokens that the model sees at most; None: the recipe's `seq_len`."""
    stride: int | None = None
    """Tokens that each window of a document scores after the first one; None: `context`, as lm-eval. Fewer give each
    token more to see, and take longer."""
    batch_tokens: int | None = None
    """Tokens per batch, which bounds the memory; None: 8192, or `context` if that is more."""
    dtype: str | None = None
    """fp32, bf16 or fp16; None: that of the run's validation (`precision.mode`)."""
    text_key: str | None = None
    """Field of .jsonl files that holds a document's text; None: the recipe's `data.text_key`."""

    def __post_init__(self) -> None:
        for name, valid, allowed in (
            ("shots", self.shots >= 0, "0 or more"),
            ("seed", 0 <= self.seed < 2**63, "0 to 2^63 - 1"),
            ("limit", self.limit >= 0, "0 (all) or more"),
            ("context", self.context is None or self.context >= 1, "1 or more"),
            ("stride", self.stride is None or self.stride >= 1, "1 or more"),
            ("batch_tokens", self.batch_tokens is None or self.batch_tokens >= 1, "1 or more"),
            ("dtype", self.dtype in (None, *COMPUTED), f"one of {', '.join(COMPUTED)}"),
            ("shots_from", self.shots_from is None or self.shots > 0, "used with shots of 1 or more only"),
        ):
            if not valid:
                raise UserError(f"{name} = {getattr(self, name)}: must be {allowed}")


def evaluate(
    run: Path,
    texts: Sequence[Path | str] = (),
    tasks: Sequence[Path | str] = (),
    how: Evaluation = Evaluation(),
    *,
    step: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Evaluates the checkpoint of a step (None: the newest) on texts and task files, in this process.

    tell: is called with what has been done, many times a second.

    Returns plain data: what was evaluated (run, step, dtype, device, context, stride), a row for each of `texts` and
    `tasks`. See docs/evaluation.md for the keys. Raises UserError: nothing to evaluate, a file or line that cannot be
    used, or a model that scores no text."""
    if not texts and not tasks:
        raise UserError("nothing to evaluate: name text files, task files, or both")
    guard(run)
    recipe = load(run / "recipe.toml")
    if not card_of(recipe.model).causal:
        raise UserError(
            f"{recipe.model.arch} is bidirectional: it gives no likelihood of a text from left to right. Use a run of "
            f"{having('causal', 'or')}; the masked loss is in the run's metrics.jsonl"
        )
    context = _length("context", how.context, recipe.model.seq_len, "the recipe's model.seq_len")
    stride = _length("stride", how.stride, context, "context")
    if how.batch_tokens is not None and how.batch_tokens < context:
        raise UserError(
            f"batch_tokens = {how.batch_tokens}: must be {context} or more, or lower context = {context}"
        )
    for path in texts:  # errors come before the weights are read
        require_readable(Path(path))
    scored = [_read_task(Path(path), how) for path in tasks]
    device, folder = device_for(0), store.chosen(run, step)
    dtype = how.dtype or PRECISIONS[chosen(recipe.precision.mode, has_fast_bf16(device.type))].working
    module, _, tokenizer = open_run(run, checkpoint=folder, device=device, dtype=torch_dtype(dtype))
    tokenizer = require_tokenizer(run, tokenizer)
    scorer = Scorer(module, tokenizer, recipe.model, context, how.batch_tokens, template_of(run, tokenizer))
    text_key = how.text_key or recipe.data.text_key
    rows = [_text(scorer, Path(path), stride, text_key, tell) for path in texts]
    return {
        "run": str(run),
        "step": store.step_in(folder),
        "dtype": dtype,
        "device": device.type,
        "context": context,
        "stride": stride,
        "texts": rows + ([_text_row("all files", rows)] if len(rows) > 1 else []),
        "tasks": [score_task(scorer, tell) for score_task in scored],
    }


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


@dataclass(frozen=True)
class Scorer:
    """A model with its tokenizer, which scores texts."""

    module: LanguageModel
    tokenizer: Tokenizer
    model: ModelSection
    context: int
    batch_tokens: int | None = None
    template: ChatTemplate | None = None

    def encode(self, text: str) -> np.ndarray:
        ids = self.tokenizer.encode_array(text).astype(np.int32)
        V = self.model.vocab_size or 0
        if len(ids) and ids.max() >= V:
            raise UserError(f"the tokenizer gives token id {ids.max()}; the model knows ids 0 to {V - 1}")
        return ids

    def document(self, text: str) -> np.ndarray:
        """Tokens of a document behind `begin_ids` (lm-eval: prefix_token_id), so the first is scored, too. The end of
        the document is not."""
        return np.concatenate([np.array(self.tokenizer.begin_ids, np.int32), self.encode(text)])

    def continuations(self, context: str, continuations: Sequence[str]) -> list[Request]:
        """Requests that score each continuation behind the context.

        As lm-eval (lm_eval/api/model.py, `_encode_pair` and `loglikelihood`): blanks at the end of the context go to
        the continuation, because most tokenizers join a blank with the word behind it. Context and continuation are
        encoded together, and the number of tokens of the context alone says where the continuation begins. Behind an
        empty context the continuation begins a document. Any other context begins as a prompt does. Of texts that are
        too long the beginning is cut off.
        Raises UserError: a continuation has no token of its own, or more than the model sees at once."""
        front = context.rstrip()
        seen = len(self.encode(front))
        begin = np.array(self.tokenizer.start_ids if seen else self.tokenizer.begin_ids, np.int32)
        found: list[tuple[np.ndarray, int]] = []
        for continuation in continuations:
            tokens = np.concatenate([begin, self.encode(context + continuation)])
            scored = len(tokens) - len(begin) - seen
            if not 1 <= scored <= self.context:
                raise UserError(f"{continuation!r:.60} has {scored} tokens; must be 1 to {self.context}")
            found.append((tokens, scored))
        most = self.context + 1
        shared = _shared(found) if all(len(tokens) <= most for tokens, _ in found) else 0
        return [Request(tokens[-most:], scored, shared, len(tokens) > most) for tokens, scored in found]

    def reply(self, messages: Sequence[Message]) -> Request:
        """A request that scores the last answer of a conversation, with the tokens that end it, as training counts it.
        Raises UserError: the run knows no conversations, or the answer is longer than the model sees at once."""
        if self.template is None:
            raise UserError("this is a conversation, and the run has no chat template (data.chat_template)")
        try:
            encoded = self.template.encode(messages)
        except NotAConversation as error:
            raise UserError(str(error)) from None
        last = np.flatnonzero(encoded.counted)[-1] + 1
        scored = int(last - 1 - np.flatnonzero(~encoded.counted[:last])[-1])
        if scored > self.context:
            raise UserError(f"the answer has {scored} tokens; must be at most {self.context}")
        tokens = encoded.ids[:last].astype(np.int32)  # it begins with its own first token, as in training
        return Request(tokens[-self.context - 1 :], scored, cut=len(tokens) > self.context + 1)

    def score(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Score]]:
        return score(self.module, self.model, requests, self.batch_tokens or max(BATCH_TOKENS, self.context))


def _shared(found: Sequence[tuple[np.ndarray, int]]) -> int:
    """The number of tokens in which all (tokens, scored) begin alike, before those that predict scored ones; 0 where it
    is not worth a pass of its own."""
    first = found[0][0]
    alike = min(len(tokens) - 1 - scored for tokens, scored in found)
    for tokens, _ in found:
        same = first[:alike] == tokens[:alike]
        alike = alike if same.all() else int(same.argmin())
    return alike if len(found) > 1 and alike >= LEAST_SHARED else 0


def _text(
    scorer: Scorer, path: Path, stride: int, text_key: str, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Figures of a file's documents, each scored by itself."""
    row = {"documents": 0, "bytes": 0, "words": 0, "tokens": 0, "nats": 0.0}

    def requests() -> Iterator[Request]:
        for text in documents(path, text_key):
            try:
                tokens = scorer.document(text)
            except UserError as error:
                raise UserError(f"{path}, document {row['documents'] + 1}: {error}") from None
            row["documents"] += 1
            row["bytes"] += len(text.encode())
            row["words"] += len(re.split(r"\s+", text))  # as lm-eval (lm_eval/api/task.py, count_words)
            row["tokens"] += len(tokens) - len(scorer.tokenizer.begin_ids)
            yield from windows(tokens, scorer.context, stride, len(scorer.tokenizer.begin_ids))

    scored = 0
    for request, found in scorer.score(requests()):
        row["nats"] -= found.log_p
        scored += request.scored
        tell(f"{path}: {scored:,} tokens")
    if not row["tokens"]:
        raise UserError(f"{path} holds no text")
    return _text_row(str(path), [row])


def _text_row(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    sums = {key: sum(row[key] for row in rows) for key in ("documents", "bytes", "words", "tokens", "nats")}
    return {
        "file": name,
        **sums,
        "perplexity": _exp(sums["nats"] / sums["tokens"]),
        "word_perplexity": _exp(sums["nats"] / sums["words"]),
        "bits_per_byte": sums["nats"] / sums["bytes"] / math.log(2),
    }


def _read_task(path: Path, how: Evaluation) -> Callable[[Scorer, Callable[[str], None]], dict[str, Any]]:
    """Reads a task file. Returns what scores it: figures, and in `details` a row for each item."""
    schema, items = read_items(path)
    pool, source, same = items, path, how.shots_from is None
    if how.shots_from is not None:
        source = Path(how.shots_from)
        pool = read_items(source)[1]
    if how.shots and (items[0].messages or pool[0].messages):
        raise UserError(f"{path}: conversations have no shots. Put solved examples into their messages")
    if how.shots:
        require_enough(how.shots, source, pool, same=same)
    items = items[: how.limit or None]
    contexts = list(prompts(items, how.shots, pool, how.seed, same=same))
    facts: dict[str, Any] = {"file": str(path), "schema": schema, "items": len(items)}
    facts |= {"shots": how.shots, "seed": how.seed}

    def requests(scorer: Scorer) -> Iterator[Request]:
        for item, context in zip(items, contexts, strict=True):
            try:
                if item.messages:
                    yield scorer.reply(item.messages)
                else:
                    yield from scorer.continuations(context, [item.join + choice for choice in item.choices])
            except UserError as error:
                raise UserError(f"{path}, line {item.line}: {error}") from None

    def figures(scorer: Scorer, tell: Callable[[str], None]) -> dict[str, Any]:
        scores, details = scorer.score(requests(scorer)), list[dict[str, Any]]()
        for item in items:
            details.append(_judge(item, list(islice(scores, len(item.choices)))))
            tell(f"{path}: {len(details):,} of {len(items):,} items")
        row = facts | {"cut": sum(detail["cut"] for detail in details)}
        row |= _mean("accuracy", [detail["right"] for detail in details])
        if all(len(item.choices) == 1 for item in items):
            row["perplexity"] = _exp(-fmean(detail["log_likelihoods"][0] for detail in details))
        else:
            row |= _mean("accuracy_norm", [detail["right_norm"] for detail in details])
        row["kinds"] = _kinds(items, details)
        return row | {"details": details}

    return figures


def _kinds(items: Sequence[Item], details: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each kind that items name: their number, the share of right answers, and that of each guess."""
    found: dict[str, dict[str, float]] = {}
    for kind in dict.fromkeys(item.kind for item in items if item.kind):
        rows = [(item, detail) for item, detail in zip(items, details, strict=True) if item.kind == kind]
        found[kind] = {"items": len(rows), "accuracy": fmean(detail["right"] for _, detail in rows)}
        found[kind] |= {name: fmean(item.guesses[name] for item, _ in rows) for name in rows[0][0].guesses}
    return found


def _judge(item: Item, scored: Sequence[tuple[Request, Score]]) -> dict[str, Any]:
    """The choice with the largest log-likelihood, and that with the largest per character. As lm-eval
    (lm_eval/api/task.py, process_results): lengths are those of the choices' characters, without the blank before them;
    of equals the first counts. A completion is right if greedy decoding would write it."""
    log_p = [found.log_p for _, found in scored]
    detail: dict[str, Any] = {"line": item.line, "answer": item.answer, "log_likelihoods": log_p}
    detail["greedy"] = [found.greedy for _, found in scored]
    detail["cut"] = any(request.cut for request, _ in scored)
    if len(item.choices) == 1:
        return detail | {"right": scored[0][1].greedy}
    per_character = [p / len(choice) for p, choice in zip(log_p, item.choices, strict=True)]
    chosen_one, chosen_norm = log_p.index(max(log_p)), per_character.index(max(per_character))
    detail |= {"chosen": chosen_one, "chosen_norm": chosen_norm}
    return detail | {"right": chosen_one == item.answer, "right_norm": chosen_norm == item.answer}


def _mean(name: str, right: Sequence[bool]) -> dict[str, float | None]:
    """The share of right answers with its standard error (None for a single item)."""
    error = stdev(map(float, right)) / math.sqrt(len(right)) if len(right) > 1 else None
    return {name: fmean(right), f"{name}_stderr": error}


def _exp(nats: float) -> float | None:
    """None: beyond what a number holds."""
    return math.exp(nats) if nats < 700 else None


def _length(name: str, value: int | None, most: int, what: str) -> int:
    if value is not None and value > most:
        raise UserError(f"{name} = {value}: must be at most {most} ({what})")
    return value or most


def windows(tokens: np.ndarray, context: int, stride: int, begin: int = 1) -> Iterator[Request]:
    """Requests that score each token of a document once, except the first `begin`, which only begin it (n + begin).

    The first window scores as many tokens as the model sees: `context` of them behind a single one that begins. Every
    further one scores the next `stride` tokens. Its input has `context` tokens, too: those before the scored ones come
    again. The last window scores what is left, also with a whole context to see. With stride = context this is the rule
    of lm-evaluation-harness 0.4.13 (lm_eval/utils.py, get_rolling_token_windows with context_len = 1).
    """
    done, end = min(begin, context), len(tokens)
    if first := min(context + 1, end) - done:
        yield Request(tokens[: done + first], first)
    done += first
    while done < end:
        new = min(stride, end - done)
        done += new
        yield Request(tokens[done - context - 1 : done], new, cut=True)


def score(
    module: LanguageModel, model: ModelSection, requests: Iterable[Request], batch_tokens: int
) -> Iterator[tuple[Request, Score]]:
    """Each request with its score, in the order of the requests.

    A batch has at most `batch_tokens` tokens, shared ones and padding included; a longer request is a batch of its own.
    Requests of about the same length share a batch. The same requests give the same batches, and so the same bits.
    Raises UserError: the model's output is not finite."""
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
