"""Train your own module on your own data: Fivefold brings the loop, precision, ranks, checkpoints and report.

python examples/own_model.py
"""

import numpy as np
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import fivefold

V, T = 16, 24  # vocabulary, length of a sequence


class Recall(nn.Module):
    """Predicts at each position the number seen three positions ago."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.embed, self.rnn, self.head = nn.Embedding(V, dim), nn.RNN(dim, dim), nn.Linear(dim, V)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:  # (B, T) each, int64 -> scalar mean loss
        hidden, _ = self.rnn(self.embed(inputs.T))  # (T, B, dim)
        return cross_entropy(self.head(hidden).transpose(0, 1).flatten(0, 1), targets.flatten())


class Numbers:
    def batch(self, i: int, rows: range) -> tuple[np.ndarray, np.ndarray]:
        """Rows of batch i. It depends on i alone, so a resumed run and every rank see the same batch."""
        x = np.random.default_rng(i).integers(0, V, (32, T + 3))[rows.start : rows.stop]
        return x[:, 3:], x[:, :-3]


if __name__ == "__main__":  # the ranks import this file too
    sizes = [f"model.seq_len={T}", "train.global_batch_size=32", "train.val_sequences=32"]
    recipe = fivefold.load("quickstart", [*sizes, "train.steps=100", "train.val_every=20", "optim.lr=1e-2"])
    fivefold.train(recipe, nproc=2, model=Recall(), data=Numbers(), val_data=Numbers())
