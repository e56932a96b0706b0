"""Memory of a rank: its states, what operations keep for backward, buffers."""
