"""Next-character prediction with an LSTM."""

from __future__ import annotations

from torch import Tensor, nn


class NextCharacter(nn.Module):
    """The next character at every step of a sequence of character ids: embedding, LSTM, linear layer on each state.

    LEAF's network for Shakespeare. With 73 characters: 818,065 parameters with 256 hidden units, 212,753 with 128.
    """

    def __init__(self, characters: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, length, characters] of ids [n, length]."""
        states, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.head(states)
        return logits
