"""Talk: a run's model continues a text, or answers, token by token.

The model lives in a process of its own, `main`, so that neither a large model nor a damaged one hinders the page, and
the server needs no torch. There is one such process, with one model and one answer at a time: what is asked next ends
the answer before. It yields the processor to trainings.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from select import select
from typing import TYPE_CHECKING, Any

from starlette.routing import Route

from fivefold.errors import CheckFailed, UserError
from fivefold.launch.verdict import in_words
from fivefold_play.state import Params, State, condition, events, get, post

if TYPE_CHECKING:
    from fivefold.train.generate import Chat

NONE = type(None)
KINDS = {"step": ((int, NONE), None), "text": ((str, NONE), None), "system": ((str,), ""), "messages": ((list,), []),
         "temperature": ((int, float), 0.8), "max_tokens": ((int,), 200), "seed": ((int,), 0)}  # fmt: skip
"""What a question has besides its run: types, default. step: None is the latest. Without a text the model is opened."""
MOST_TEXT, MOST_TOKENS, HOTTEST = 200_000, 10_000, 100
LIKELIEST = 5
"""Tokens that are shown beside each that was chosen."""
IDLE_S = 900
"""The process ends when nothing was asked for so long, and frees its memory."""
NICE = 10


def routes(state: State) -> list[Route]:
    talker = Talker()
    return [
        get("/api/talk/runs", lambda given: {"runs": runs(state)}),
        post("/api/talk/ask", lambda given: {"id": talker.ask(question(state, given))}),
        events("/api/talk/answer", lambda given: talker.answer(given.get("id"))),
    ]


def runs(state: State) -> list[dict[str, Any]]:
    """Those that have made a step, the newest first: {name, step, ...}."""
    found = [{"name": name, **condition(run)} for name, run in state.runs().items()]
    return [run for run in found if run["step"]]


def question(state: State, given: Params) -> dict[str, Any]:
    """What was asked, checked but for what only the model knows."""
    found: dict[str, Any] = {"run": str(state.run(given.get("run")))}
    for key, (kinds, default) in KINDS.items():
        found[key] = given.get(key, default)
        if type(found[key]) not in kinds:
            raise UserError(f"{key}: must be of type {' or '.join(kind.__name__ for kind in kinds)}")
    for key, most in (("max_tokens", MOST_TOKENS), ("temperature", HOTTEST)):
        if found[key] > most:
            raise UserError(f"{key}: at most {most:,}")
    if len(str(found)) > MOST_TEXT:
        raise UserError(f"text: at most {MOST_TEXT:,} characters in all")
    return found


class Talker:
    """The process with the model, as the server sees it."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.lock, self.number = threading.Lock(), 0
        self.lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()  # of the last answer

    def ask(self, question: dict[str, Any]) -> int:
        """Begins an answer. Returns its number."""
        with self.lock:
            if self.process is None or self.process.poll() is not None:
                words, pipe = [sys.executable, "-P", "-m", "fivefold_play.talk"], subprocess.PIPE
                self.process = subprocess.Popen(words, stdin=pipe, stdout=pipe, start_new_session=True)
                threading.Thread(target=self._read, args=(self.process,), daemon=True).start()
            self.lines.put({"end": "another"})
            self.number, self.lines = self.number + 1, queue.SimpleQueue()
            self._tell(question | {"id": self.number})
            return self.number

    def _tell(self, request: dict[str, Any]) -> None:
        if self.process is not None and self.process.stdin is not None:
            with suppress(BrokenPipeError):  # `_read` says that it has ended
                self.process.stdin.write(json.dumps(request).encode() + b"\n")
                self.process.stdin.flush()

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with suppress(ValueError), self.lock:  # the last line of one that is killed may be half a line
                if (found := json.loads(line)).pop("id") == self.number:
                    self.lines.put(found)
        why = (
            f"the model's process has ended ({in_words(process.wait())}); the server's terminal has its words"
        )
        if process.returncode == -signal.SIGKILL:
            why = "the model's process was killed: the system may have run out of memory"
        with self.lock:
            if process is self.process:
                self.lines.put({"end": "error", "error": why})

    def answer(self, name: object) -> Iterator[Any]:
        """The lines of an answer (`answered`) as they come. The last one has `end`. When nobody listens any more, the
        answer stops."""
        lines, line = self.lines, dict[str, Any]()
        if name != str(self.number):
            yield {"end": "another"}
            return
        try:
            while "end" not in line:
                try:
                    yield (line := lines.get(timeout=1))
                except queue.Empty:
                    yield None
        finally:
            with self.lock:
                if lines is self.lines and "end" not in line:
                    self._tell({})


def answered(chats: dict[str, Chat], question: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The lines of an answer: {about: the checkpoint, the others of its run, and what it has learned}; then {text,
    tokens: [{token, p, others: [[token, p]]}]} for each piece of text that is certain. p: the model's own
    probabilities, whatever the temperature. chats: has the model that is open, by its checkpoint. Raises UserError."""
    from pathlib import Path

    from torch import Tensor

    from fivefold.checkpoint import store
    from fivefold.data.chat import NotAConversation, messages_of
    from fivefold.train.generate import Sampling, open_chat

    run = Path(question["run"])
    checkpoint = store.chosen(run, question["step"])
    if str(checkpoint) not in chats:
        chats.clear()
        chats[str(checkpoint)] = open_chat(run, checkpoint)
    chat, steps = chats[str(checkpoint)], [store.step_in(folder) for folder in store.checkpoints(run)]
    about = {"step": store.step_in(checkpoint), "steps": steps, "chat": chat.template is not None}
    yield {"about": about | {"context": chat.model.seq_len}}
    if question["text"] is None:
        return
    try:
        chat.messages = [*messages_of(question["messages"])] if question["messages"] else []
    except NotAConversation as error:
        raise UserError(str(error)) from None
    chat.text, chat.turns, chat.system = "", len(chat.messages) // 2, question["system"]
    chat.sampling = Sampling(question["max_tokens"], question["temperature"], seed=question["seed"])
    tokens = list[dict[str, Any]]()

    def seen(logits_V: Tensor, token: int) -> None:
        likeliest = (p_V := logits_V.double().softmax(0)).topk(min(LIKELIEST, len(p_V)))
        others = [[word(i), p] for p, i in zip(*map(Tensor.tolist, likeliest), strict=True)]
        tokens.append({"token": word(token), "p": float(p_V[token]), "others": others})

    def word(token: int) -> str:
        return "end of the text" if token == chat.tokenizer.end_id else chat.tokenizer.decode([token])

    for text in chat.ask(question["text"], seen):
        yield {"text": text, "tokens": [*tokens]}
        tokens.clear()
    yield {"text": "", "tokens": tokens}


def main() -> None:
    """Answers questions, lines of JSON: {id, ...} begins an answer, and any line ends the one before. Ends with its
    input, or when nothing comes for IDLE_S. It has no thread: one that waits for input would let Python abort at the
    end."""
    os.nice(NICE)
    out, rest, chats = os.dup(1), b"", dict[str, Any]()
    os.dup2(2, 1)  # what libraries print is no answer

    def tell(question: dict[str, Any], line: dict[str, Any]) -> None:
        os.write(out, json.dumps({"id": question["id"]} | line).encode() + b"\n")

    while select([0], [], [], IDLE_S)[0] and (piece := os.read(0, 1 << 16)):
        *lines, rest = (rest + piece).split(b"\n")
        for number, text in enumerate(lines, 1):
            if "id" not in (question := json.loads(text)):
                continue
            last: dict[str, Any] = {"end": "complete"}
            try:
                for line in answered(chats, question):
                    tell(question, line)
                    if number < len(lines) or select([0], [], [], 0)[0]:
                        last = {"end": "stopped"}
                        break
            except (UserError, CheckFailed, OSError) as error:  # a checkpoint may just have been removed
                last = {"end": "error", "error": str(error)}
            tell(question, last)


if __name__ == "__main__":
    with suppress(BrokenPipeError):  # the server was killed
        main()
