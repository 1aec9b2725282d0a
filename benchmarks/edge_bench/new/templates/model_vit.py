"""Your model: `build` returns a PyTorch module that takes a batch of samples as `data.py` gives them."""

from torch import Tensor, nn


class Vit(nn.Module):
    """A vision transformer: patches of 2x2 as tokens, two layers of attention, the mean of all tokens decides."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.places = nn.Embedding(16, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.places.weight  # [n, 16, width]
        logits: Tensor = self.head(self.encoder(tokens).mean(1))
        return logits


def build() -> nn.Module:
    """8x8 grey images [n, 1, 8, 8] to ten classes [n, 10]."""
    return Vit()
