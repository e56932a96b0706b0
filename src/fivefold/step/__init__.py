"""One optimizer step: the state, and what changes it."""
