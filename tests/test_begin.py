"""How a text begins: as in training, and for an imported folder as its own tokenizer says. Greedy text is that of
`transformers`.

The tokenizers are trained here, with the parts, templates and special tokens that published families have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers
import torch
from marks import only
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fivefold import Run, load, train
from fivefold.checkpoint.source import export_run, import_folder
from fivefold.models.base import build
from fivefold.models.hf import hf_config, to_hf
from fivefold.recipe import ModelSection, resolve_model
from fivefold.train.evaluate import Scorer
from fivefold.train.generate import Chat, Sampling, open_chat, open_run

TEXT = (
    "def the_cat(sat):\n    return 'on the mat', 12345\n\nIn 1999, the naïve cat sat — 日本語 — on Zoë's mat.\n"
    * 30
)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEXT_END = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
BOS_EOS = {"bos_token": "<s>", "eos_token": "</s>"}


class Family(NamedTuple):
    """special: its tokens, in order. spelled: how text becomes letters. before: what the template puts before a text;
    None: it has no template. config: of tokenizer_config.json."""

    arch: str
    special: tuple[str, ...]
    spelled: str
    before: tuple[str, ...] | None
    config: dict[str, Any]


FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}
FAMILIES = {
    "llama2": Family("llama", ("<unk>", "<s>", "</s>"), "prepend", ("<s>",), BOS_EOS),
    "llama2-first": Family("llama", ("<unk>", "<s>", "</s>"), "metaspace", ("<s>",), BOS_EOS),
    "llama3": Family(
        "llama", ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"), "llama3", ("<|begin_of_text|>",),
        {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"},
    ),
    "gemma": Family(
        "gemma3", ("<pad>", "<eos>", "<bos>", "<unk>"), "replace", ("<bos>",),
        {"bos_token": "<bos>", "eos_token": "<eos>", "add_bos_token": True},
    ),
    "qwen2": Family(
        "qwen2", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "qwen2", None,
        {"bos_token": None, "eos_token": "<|endoftext|>", "add_bos_token": False},
    ),
    "gpt2": Family("gpt2", ("<|endoftext|>",), "bytes", None, TEXT_END),
    "mistral": Family(
        "mistral", ("<unk>", "<s>", "</s>"), "metaspace", ("<s>",),
        {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True},
    ),
    "phi3": Family(
        "phi3", ("<unk>", "<s>", "</s>", "<|endoftext|>"), "prepend", (),
        {"bos_token": "<s>", "eos_token": "<|endoftext|>", "add_bos_token": False},
    ),
    "smollm": Family(
        "smollm3", ("<|endoftext|>", "<|im_start|>", "<|im_end|>"), "bytes", (),
        {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
    ),
    "olmo2": Family("olmo2", ("<|endoftext|>",), "llama3", None, TEXT_END),
    "glm4": Family(
        "glm4", ("<|endoftext|>", "[gMASK]", "<sop>", "<|user|>"), "llama3", ("[gMASK]", "<sop>"),
        {"eos_token": "<|endoftext|>"},
    ),
    "gpt_oss": Family(
        "gpt_oss", ("<|startoftext|>", "<|endoftext|>", "<|return|>"), "llama3", None,
        {"bos_token": "<|startoftext|>", "eos_token": "<|return|>"},
    ),
}  # fmt: skip


def made(family: Family) -> tokenizers.Tokenizer:
    sentencepiece = family.spelled in ("prepend", "metaspace", "replace")
    unk: Any = {"unk_token": "<unk>", "byte_fallback": True, "fuse_unk": True} if sentencepiece else {}
    inner: Any = tokenizers.Tokenizer(models.BPE(**unk))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=family.spelled == "bytes")
    inner.decoder = decoders.ByteLevel()
    if sentencepiece:
        inner.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    if family.spelled in ("prepend", "metaspace"):
        strip = [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
        inner.decoder = decoders.Sequence(strip)
    if family.spelled == "prepend":
        inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    elif family.spelled == "metaspace":
        inner.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    elif family.spelled == "replace":
        inner.normalizer = normalizers.Replace(" ", "▁")
        inner.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif family.spelled in ("llama3", "qwen2"):
        digits = LLAMA3 if family.spelled == "llama3" else LLAMA3.replace("{1,3}", "")
        split = pre_tokenizers.Split(Regex(digits), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    else:
        inner.pre_tokenizer = byte_level
    bytes_ = [f"<0x{b:02X}>" for b in range(256)] if sentencepiece else []
    special = [AddedToken(t, special=True, normalized=False) for t in family.special]
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=[*special, *bytes_], show_progress=False, max_token_length=6,
        initial_alphabet=[] if sentencepiece else sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    inner.train_from_iterator(TEXT.splitlines(keepends=True), trainer=trainer)
    if sentencepiece:  # the letters of bytes are ordinary tokens
        spec = json.loads(inner.to_str())
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["content"] in family.special]
        inner = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if family.before is not None:
        single = " ".join([*family.before, "$A"])
        known = [(t, inner.token_to_id(t)) for t in family.before]
        template: Any = processors.TemplateProcessing(
            single=single, pair=f"{single} $B", special_tokens=known
        )
        if family.spelled in ("llama3", "bytes"):
            template = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        inner.post_processor = template
    return inner


def written(name: str, folder: Path) -> Path:
    """A folder as published ones are: random weights of 2 layers, and the family's tokenizer."""
    from families import small
    from safetensors.torch import save_file

    family = FAMILIES[name]
    inner, size = made(family), {"layers": 2, "dim": 32, "heads": 4, "seq_len": 64, "init_std": 0.3}
    size["vocab_size"] = ids = inner.get_vocab_size(with_added_tokens=True)  # not padded
    section = small(family.arch, **size) if family.arch != "gpt2" else ModelSection(arch="gpt2", **size)
    model = resolve_model(section, vocab_size=ids)
    folder.mkdir()
    weights = to_hf(build(model, device="cpu", seed=5).state_dict(), model)
    save_file(
        {k: t.contiguous() for k, t in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    ends = {
        f"{role}_token_id": inner.token_to_id(family.config.get(f"{role}_token") or "")
        for role in ("bos", "eos")
    }
    (folder / "config.json").write_text(json.dumps(hf_config(model, torch.float32) | ends))
    (folder / "tokenizer.json").write_text(inner.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(FAST | family.config))
    return folder


@pytest.fixture
def cases(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path, Path]:
    folder = written(request.param, tmp_path / "hf")
    return request.param, folder, import_folder(folder, tmp_path / "run")


PROMPTS = ["The cat", "def ", " sat on the naïve", "\n\nIn 1999"]


@only("llama2", "glm4", "qwen2")
@pytest.mark.parametrize("cases", FAMILIES, indirect=True)
def test_the_greedy_text_of_an_imported_folder_is_that_of_transformers(cases: tuple[str, Path, Path]):
    transformers = pytest.importorskip("transformers")
    name, folder, run = cases
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    _, _, ours = open_run(run)
    assert ours is not None
    for prompt in PROMPTS:
        ids = theirs(prompt, return_tensors="pt").input_ids
        assert ours.begun(prompt) == ids[0].tolist()
        said = model.generate(ids, max_new_tokens=20, do_sample=False)[0]
        expected = theirs.decode(said[ids.shape[1] :], skip_special_tokens=True)
        got = Run(run).generate(prompt, max_tokens=20, temperature=0.0)
        assert got.lstrip() == expected.lstrip(), (
            name,
            prompt,
        )  # a blank that begins a text is no text there
        assert got


def test_all_ways_to_begin_are_one(tmp_path: Path):
    """Prompts, samples, chat of a base model and evaluation, for a folder with two tokens before a text."""
    folder = written("glm4", tmp_path / "hf")
    run = import_folder(folder, tmp_path / "run")
    module, recipe, tokenizer = open_run(run)
    assert tokenizer is not None
    before = [tokenizer.special_tokens[t] for t in ("[gMASK]", "<sop>")]
    assert tokenizer.begun("") == before
    scorer = Scorer(module, tokenizer, recipe.model, 64)
    assert scorer.document("The cat")[:2].tolist() == before
    (request,) = scorer.continuations("The cat", [" sat"])
    assert request.tokens[:2].tolist() == before
    (tmp_path / "a.txt").write_text(TEXT)
    row = Run(run).evaluate(tmp_path / "a.txt", context=16)["texts"][0]
    assert row["tokens"] == len(tokenizer.encode(TEXT))
    greedy = Sampling(20, temperature=0)
    said = Run(run).generate("The cat", max_tokens=20, temperature=0.0)
    assert "".join(Chat(module, recipe.model, tokenizer, None, greedy).ask("The cat")) == said
    assert "".join(open_chat(run, sampling=greedy).ask("The cat")) == said


def test_a_chat_template_that_writes_bos_has_it_once(tmp_path: Path):
    folder = written("llama2", tmp_path / "hf")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    template = (
        "{{ bos_token }}{% for m in messages %}{{ '[' + m.role + '] ' + m.content + eos_token }}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    chat = open_chat(import_folder(folder, tmp_path / "run"))
    assert chat.template is not None
    asked = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    bos = chat.tokenizer.special_tokens["<s>"]
    reply = Scorer(chat.module, chat.tokenizer, chat.model, 64, None, chat.template).reply(asked)
    assert list(reply.tokens).count(bos) == chat.template.prompt(asked[:1]).count(bos) == 1


def test_a_trained_run_begins_as_in_training_and_so_does_its_export(tmp_path: Path):
    """A memorized beginning is written behind the end token only. Other programs read it from the export."""
    (tmp_path / "a.jsonl").write_text(
        "".join(json.dumps({"text": "alpha eps eps eps"}) + "\n" for _ in range(400))
    )
    recipe = load(
        "quickstart", ["model.layers=1", "model.dim=32", "model.heads=2", "model.seq_len=32", "data.tokenizer=bytes",
        "optim.lr=1e-2",
        f"data.source={tmp_path / 'a.jsonl'}", "data.document_masks=true", "train.steps=80", "train.val_every=80",
        "train.sample_every=80", "train.sample_prompt=a", "layout.dp_replicate=1", f"data.cache={tmp_path / 'cache'}"],
    )  # fmt: skip
    run = train(recipe, tmp_path / "run", quiet=True)
    tokenizer = run.tokenizer
    assert tokenizer.begun("a") == [tokenizer.end_id, ord("a")]
    assert run.generate("a", max_tokens=16, temperature=0.0) == "lpha eps eps eps"
    exported = export_run(run.path, tmp_path / "hf")
    again = Run(import_folder(exported, tmp_path / "again"))
    assert again.tokenizer.begun("a") == tokenizer.begun("a")
    assert again.generate("a", max_tokens=16, temperature=0.0) == "lpha eps eps eps"
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(exported)
    assert theirs("a").input_ids == tokenizer.begun("a")
    assert (theirs.bos_token, sorted(theirs("a"))) == ("<|end|>", ["attention_mask", "input_ids"])


def test_bits_per_byte_have_one_definition(tmp_path: Path):
    """Validation and `eval` give the same figure for the same short documents: that of their text alone."""
    lines = "".join(
        json.dumps({"text": f"document {n} has {'few ' * (n % 5)}words"}) + "\n" for n in range(80)
    )
    (tmp_path / "a.jsonl").write_text(lines)
    run = train(load(
        "quickstart", ["model.layers=1", "model.dim=32", "model.heads=2", "model.seq_len=64", "data.tokenizer=bytes",
        f"data.source={tmp_path / 'a.jsonl'}", "data.document_masks=true", "data.packing=best_fit", "train.steps=3",
        "data.val_fraction=0", "train.val_every=3", "train.val_sequences=512", "train.sample_tokens=1",
        "layout.dp_replicate=1", f"data.cache={tmp_path / 'cache'}", "precision.mode=fp32",
        f"data.validation=[{{name = 'same', source = '{tmp_path / 'a.jsonl'}'}}]"],
    ), tmp_path / "run", quiet=True)  # fmt: skip
    found = run.evaluate(tmp_path / "a.jsonl", dtype="fp32")["texts"][0]["bits_per_byte"]
    assert [line for line in run.metrics() if "val_loss" in line][-1]["val_bits_per_byte"] == pytest.approx(
        found, rel=1e-5
    )
