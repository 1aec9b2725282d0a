"""The benchmarks' PyTorch models, from the tables of the papers they reproduce."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn

HAR = 1152, 300, 100, 6
"""The HAR network of HideNseek: 376,606 parameters."""
DIGITS = 64, 64, 32, 10
"""For scikit-learn's 8x8 digits."""


def mlp(*sizes: int) -> nn.Sequential:
    """A multilayer perceptron with ReLU between its layers, e.g. ``mlp(1152, 300, 100, 6)``."""
    parts: list[nn.Module] = []
    for i, (inner, out) in enumerate(pairwise(sizes)):
        parts += [nn.Linear(inner, out), nn.ReLU()] if i < len(sizes) - 2 else [nn.Linear(inner, out)]
    return nn.Sequential(*parts)


def small_cnn(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """Two convolutions with batch-norm and max-pooling on 28x28 images, then one linear layer."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, classes),
    )


def vgg9(channels: int = 1, classes: int = 10) -> nn.Sequential:
    """HideNseek's VGG9 on images padded to 32x32.

    Six 3x3 convolutions without bias, 1,124,640 weights on one input channel, batch-norm after each, four max-pools
    (32 -> 2), 1024 features and one classifier: 4.33 MiB for 10 classes, 4.53 for 62, as the paper prints.
    """
    parts: list[nn.Module] = []
    inner = channels
    for out, pool in ((32, False), (64, True), (128, False), (128, True), (256, True), (256, True)):
        parts += [nn.Conv2d(inner, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU()]
        if pool:
            parts.append(nn.MaxPool2d(2))
        inner = out
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(1024, classes))


class CharacterLstm(nn.Module):
    """The next character from a sequence of character ids [n, length]: embedding, LSTM, linear on its last output."""

    def __init__(self, characters: int, embedding: int = 8, hidden: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Logits [n, characters]."""
        states, _ = self.lstm(self.embedding(x))
        logits: Tensor = self.head(states[:, -1])
        return logits
