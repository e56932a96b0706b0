"""A fifth architecture that only the tests know: Llama without rotary positions, one norm per block."""
