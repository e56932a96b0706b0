#!/bin/sh
# safetensors 0.8.0, transformers 5.23.0, torch 2.13.0.
#
# One would guess: safetensors.torch.save_model on a model with tied embeddings keeps the name of the embedding, which is
# the parameter, and leaves out the output layer, as save_pretrained does.
# Seen: it is the other way round. The file has lm_head.weight and no model.embed_tokens.weight. That name stands in the
# file's metadata only, so a reader of tensors alone misses the embedding:
#   tensors: ['lm_head.weight']  metadata: {'model.embed_tokens.weight': 'lm_head.weight'}
# save_pretrained of the same model writes ['model.embed_tokens.weight'].
set -e
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q torch==2.13.0 safetensors==0.8.0 transformers==5.23.0
cd "$folder"
"$folder/venv/bin/python" - <<'PROGRAM'
import torch
from safetensors import safe_open
from safetensors.torch import save_model
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
size = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 64}
model = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, **size))
save_model(model, "model.safetensors")
model.save_pretrained("usual")
found = []
for path in ("model.safetensors", "usual/model.safetensors"):
    with safe_open(path, "pt") as file:
        names = [name for name in file.keys() if "embed" in name or "head" in name]
        found.append(names)
        print("tensors:", names, " metadata:", file.metadata())
assert found == [["lm_head.weight"], ["model.embed_tokens.weight"]], "the behaviour has changed"
PROGRAM
