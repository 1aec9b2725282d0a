"""A model pruned weight by weight: its mask and the values that the mask leaves, as both sides hold and send them.

A mask has one bit for each prunable weight, in the order of the parameter table: 1 for a weight that stays. What a mask
leaves are those weights and everything else that is trained; these values travel, in the order of the flat vector,
without indices. The method decides which weights stay.
"""

from __future__ import annotations

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels import codecs
from numpy.typing import NDArray

from edge_client.blocks import Blocks, frozen, tensors
from edge_client.bundle import F32, Bits, Manifest, Model, Packed
from edge_client.errors import PayloadError
from edge_client.methods import bits_digest
from edge_client.protocol.payload import Payload, coded, decoding, u8

MASK = "mask.entropy"


def prunable(manifest: Manifest) -> Blocks:
    """The weights of the maskable layers, whole tensors: each is a layer for LAMP."""
    names = {n for layer in manifest.layers for n in layer.weights if manifest.tensors[n].trainable}
    return tensors(manifest, names)


def unmasked(manifest: Manifest, mask: Bits) -> Bits:
    """bool[d]: False where a parameter is pruned."""
    out = np.ones(manifest.d, np.bool_)
    prunable(manifest).scatter(mask, out)
    return out


def alive(manifest: Manifest, mask: Bits) -> Bits:
    """bool[d]: the parameters that train and travel, dense ones included."""
    return unmasked(manifest, mask) & ~frozen(manifest)


def unpacked(manifest: Manifest, packed: Packed) -> Bits:
    """A packed mask as bool[prunable]."""
    return bitset.unpack(packed, prunable(manifest).size)


def layer_of(manifest: Manifest) -> NDArray[np.uint16]:
    """The number of each prunable weight's layer, capped: the context of a coded mask."""
    sizes = [b.size for b in prunable(manifest).blocks]
    return np.repeat(np.minimum(np.arange(len(sizes)), 4095).astype(np.uint16), sizes)


def expanded(model: Model, live: Bits, values: F32) -> F32:
    """float32[d] of the values that travel (recover from mask): zero where pruned, the bundle's where frozen."""
    theta = np.where(frozen(model.manifest), model.parameters, np.float32(0))
    theta[live] = values
    return theta


def fingerprint(mask: Packed, values: F32) -> str:
    """The 64-bit name of a mask and the values that it leaves."""
    return bits_digest(np.concatenate([mask, values.view(np.uint8)]))


def check_fingerprint(payload: Payload, held: str, error: type[PayloadError]) -> None:
    """Raise `error` unless the payload was made for the model that is held here."""
    if (said := payload.meta.get("fingerprint")) != held:
        raise error(f"the payload is for the pruned model {said!r}, but {held!r} is held here; the device trains again")


def encoded_mask(manifest: Manifest, mask: Bits) -> Packed:
    """bool[prunable] in codec `entropy`."""
    return u8(codecs.encode("entropy", mask, mask.size, layer_of(manifest)))


def decoded_mask(manifest: Manifest, payload: Payload) -> Bits:
    """The mask of a whole downlink, bool[prunable]. Raises PayloadError."""
    contexts = layer_of(manifest)
    with decoding("the mask of the downlink"):
        return codecs.decode_mask("entropy", coded(payload, MASK, ("values", "buffers")), contexts.size, contexts)
