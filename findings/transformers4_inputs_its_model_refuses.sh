#!/bin/sh
# transformers 4.57.1, tokenizers of its range, torch 2.13.0.
#
# One would guess: what a tokenizer returns can be given to the model of the same folder: model.generate(**tokenizer(text)).
# Seen: a PreTrainedTokenizerFast whose tokenizer_config.json has no model_input_names returns token_type_ids, too, and
# generate of a Llama refuses them:
#   inputs: ['attention_mask', 'input_ids', 'token_type_ids']
#   ValueError: the model_kwargs are not used by the model: ['token_type_ids']
# With model_input_names = ["input_ids", "attention_mask"] in that file the same two lines work.
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 transformers==4.57.1
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import json
from pathlib import Path

import tokenizers
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
inner = tokenizers.Tokenizer(tokenizers.models.BPE())
inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet)
inner.train_from_iterator(["the cat sat on the mat"], trainer=trainer)
size = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 300}
LlamaForCausalLM(LlamaConfig(**size)).save_pretrained("model")
inner.save("model/tokenizer.json")
config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}


def generated():
    tokenizer = AutoTokenizer.from_pretrained("model")
    inputs = tokenizer("the cat", return_tensors="pt")
    print("inputs:", sorted(inputs))
    model = LlamaForCausalLM.from_pretrained("model")
    try:
        model.generate(**inputs, max_new_tokens=2, do_sample=False)
    except ValueError as error:
        print("ValueError:", str(error)[:120])
        return False
    return True


Path("model/tokenizer_config.json").write_text(json.dumps(config))
without = generated()
Path("model/tokenizer_config.json").write_text(json.dumps(config | {"model_input_names": ["input_ids", "attention_mask"]}))
assert (without, generated()) == (False, True), "the behaviour has changed"
PROGRAM
