"""The benchmarks' PyTorch models, from the tables of the papers they reproduce. Counts of parameters are exact.

Multilayer perceptrons and small convolutional networks in `plain`, residual ones in `residual`, the ImageNet backbones
whose weights lie beside the checkout in `backbones`, a recurrent one in `recurrent`, a transformer in `attention`.
"""

from __future__ import annotations

from edge_bench.models.attention import VisionTransformer
from edge_bench.models.backbones import MobileNetBackbone, SqueezeNetBackbone
from edge_bench.models.plain import (
    DIGITS,
    DIGITS_WIDE,
    HAR,
    binary_mlp,
    emnist_cnn,
    image_cnn,
    lenet,
    mlp,
    mnist_cnn,
    small_cnn,
    vgg9,
)
from edge_bench.models.recurrent import NextCharacter
from edge_bench.models.residual import MobileNetV2, Resnet

__all__ = [
    "DIGITS",
    "DIGITS_WIDE",
    "HAR",
    "MobileNetBackbone",
    "MobileNetV2",
    "NextCharacter",
    "Resnet",
    "SqueezeNetBackbone",
    "VisionTransformer",
    "binary_mlp",
    "emnist_cnn",
    "image_cnn",
    "lenet",
    "mlp",
    "mnist_cnn",
    "small_cnn",
    "vgg9",
]
