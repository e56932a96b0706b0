#!/bin/sh
# ctranslate2 4.8.5, transformers 4.57.1, torch 2.13.0.
#
# One would guess: a folder that TransformersConverter converts without a word can be loaded by Generator, or the converter
# says what is missing.
# Seen: a Llama folder whose tokenizer_config.json names no bos_token converts, and then cannot be loaded:
#   RuntimeError: [json.exception.type_error.302] type must be string, but is null
# config.json has bos_token_id all the while. With "bos_token" in tokenizer_config.json it loads.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==4.57.1 ctranslate2==4.8.5
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import json
from pathlib import Path

import ctranslate2
import tokenizers
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
inner = tokenizers.Tokenizer(tokenizers.models.BPE())
inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
inner.train_from_iterator(["the cat sat on the mat"], trainer=trainer)
size = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
config = LlamaConfig(vocab_size=inner.get_vocab_size(), bos_token_id=0, eos_token_id=0, **size)
LlamaForCausalLM(config).save_pretrained("model")
inner.save("model/tokenizer.json")


def loads(name, **more):
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"} | more
    Path("model/tokenizer_config.json").write_text(json.dumps(settings))
    ctranslate2.converters.TransformersConverter("model").convert(name)
    try:
        ctranslate2.Generator(name)
    except RuntimeError as error:
        print("RuntimeError:", error)
        return False
    return True


assert (loads("without"), loads("with", bos_token="<end>")) == (False, True), "the behaviour has changed"
PROGRAM
