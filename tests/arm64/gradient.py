"""python gradient.py BUNDLE DATA.npz FILE.npy: one gradient of the bundle's first weights, on the first 32 samples."""

import sys
from pathlib import Path

import numpy as np

from edge_client.backends import DEFAULT_BACKEND
from edge_client.bundle import Bundle
from edge_client.training import open_trainer

if __name__ == "__main__":
    folder, data, file = sys.argv[1:]
    bundle, samples = Bundle.open(Path(folder)), np.load(data)
    model = bundle.model()
    found = open_trainer(DEFAULT_BACKEND, bundle).gradient(
        model.parameters, model.buffers, samples["x"][:32], samples["y"][:32]
    )
    np.save(file, found.parameters)
