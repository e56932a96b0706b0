"""The architectures, a folder each: a card (`card.py`, the architecture as data), the module, and its Hugging Face map.

Models know nothing of ranks. The cards and the files they use import no torch.
"""
