"""FedMask: frozen random weights, a personal binary mask, at most one bit per element both ways.

Li, Sun, Zeng, Zhang, Li, Chen, "FedMask: Joint Computation and Communication-Efficient Personalized Federated
Learning via Heterogeneous Masks", SenSys 2021. Where the paper is silent or contradicts itself, the default here is
the reading argued in docs/methods/fedmask.md and the other one is a field.

- The weights W never change: both sides make them from the bundle, whose initial scale matters (Kaiming: at
  PyTorch's default, 2.4 times smaller, HAR loses 25 points). What is learned is one bit per weight,
  ``1[sigmoid(s) >= 1/2]`` of a real score s (eq. 3-8); the group lasso pulls whole rows and columns to zero (eq. 9).
- In its first round a device prunes once: one epoch of score SGD, then of the last layers it keeps the `keep`
  largest ``|W * (s_after - s_before)|``. That STRUCTURE is its own and stays; it is sent once, and from then on
  only live elements travel: as what changed, coded (`codec`), or as published, one bit each. Changes are to bits that
  both sides know and that are named: up, to those received; down, to the device's last update; at first, and whenever
  a device could not read its downlink, to the first mask.
- The server averages an element over the devices of the round that hold it in their structure, when two or more
  do; an element that fewer hold stays as each device has it.
- An LSTM's output gate is trained and sent as float32 (`real_gates`). Batch-norm statistics stay on the device;
  so do the head (`head="local"`) and biases and every other tensor outside the masked layers (`biases="local"`).

Drawn from shared streams: the first mask (`initial_mask="random"`: the top bit of each number) from the key words
(federation seed, "fedmask", "first mask"), the order of the samples from (federation seed, "batches", "prune" or
"train", device, round, epoch from 0). Which parameter is whose: ownership.py.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import numpy as np
from edge_kernels import bits as bitset
from edge_kernels import codecs, counter
from edge_kernels.codecs import CodecError
from edge_kernels.folding import Tally
from numpy.typing import NDArray
from pydantic import Field, model_validator

from edge_client.bundle import F32, Manifest, Model
from edge_client.errors import PayloadError
from edge_client.methods import Assignment, Local, Method, Personal, Task, Total, bits_digest
from edge_client.methods.ownership import Bits, Layout, divide
from edge_client.protocol.payload import Arrays, Meta, Payload, coded, u8
from edge_client.training.loop import train
from edge_client.training.masked_sgd import masked_sgd
from edge_client.training.sgd import Sgd

# Coded arrays are named after what they hold and their codec.
MASK, STRUCTURE, PLANES = "mask.bits", "structure.bits", "mask.planes"
CODEC_HEAD = 64  # bytes that a codec may need beside one bit an element


def _live(layout: Layout, packed: NDArray[np.uint8]) -> Bits:
    return layout.expand(bitset.unpack(packed, layout.thinned))


class FedMask(Method):
    """Personal binary masks on frozen weights."""

    name: ClassVar[str] = "fedmask"
    one_time: ClassVar[frozenset[str]] = frozenset({STRUCTURE})
    shared_downlink: ClassVar[bool] = False

    keep: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Part of the pruned layers' weights that a device keeps (the paper's p_r)."""
    prune_layers: Annotated[int, Field(ge=0)] | tuple[str, ...] = 2
    """The last so many masked layers, or layers by name."""
    rank: Literal["layer", "together"] = "layer"
    """Keep the largest of each layer, or of all pruned layers together."""
    group_lasso: Annotated[float, Field(ge=0, le=100)] = 2e-4
    radius: Annotated[float, Field(ge=1e-6, le=100)] = 0.1
    """A received bit becomes the score +radius or -radius; a share p becomes radius * (2 p - 1)."""
    restart: Literal["radius", "latent"] = "radius"
    """`latent`: a device keeps its own score where the received bit is the one it had."""
    initial_mask: Literal["ones", "random"] = "ones"
    codec: Literal["auto", "entropy", "rice", "bits"] = "auto"
    """Of changed bits; `bits` sends every live element's bit as it is, like the paper."""
    down: Literal["bit", "count"] = "bit"
    """What travels down: the re-binarised average (a tie is 1), or the average in steps of one over the cohort."""
    state: Literal["global", "client"] = "global"
    """`global`: one tensor that every holder reads; `client`: a device sees only the averages it took part in."""
    head: Literal["masked", "local"] = "masked"
    """`local`: the last layer is float32, trained and kept on the device."""
    biases: Literal["frozen", "local"] = "local"
    """Biases, batch-norm scale and shift, and tensors of no maskable layer: as drawn, or trained on the device."""
    real_gates: tuple[Literal["i", "f", "g", "o"], ...] = ("o",)
    """LSTM gates that are trained and sent as float32 instead of masked."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 5
    batch: Annotated[int, Field(ge=1, le=65536)] = 32
    lr: Annotated[float, Field(gt=0, le=10_000)] = 10.0
    """Learning rate of the scores: their gradients carry a factor W / 4, hence the size."""
    local_lr: Annotated[float, Field(gt=0, le=1000)] = 0.01
    """Learning rate of everything trained as float32."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9

    @model_validator(mode="after")
    def _client_state_is_bits(self) -> FedMask:
        if self.state == "client" and self.down == "count":
            raise ValueError('state="client" keeps one bit per element and device; use down="bit"')
        return self

    def layout(self, m: Manifest) -> Layout:
        """How this configuration divides the model. Raises ConfigError when it names layers that are not there."""
        return divide(
            m.parameters,
            m.layers,
            self.prune_layers,
            self.keep,
            together=self.rank == "together",
            local_head=self.head == "local",
            local_biases=self.biases == "local",
            real_gates=self.real_gates,
        )

    @property
    def changes(self) -> str:
        """The array that coded changes travel in."""
        return f"flips.{self.codec}"

    @property
    def _down_by_change(self) -> bool:
        return self.codec != "bits" and self.down == "bit"

    # --- server half

    def start(self, model: Model, seed: int) -> Arrays:
        """The tensor m: `share` float32[masked] in 0..1, the round each element was last averaged in, the real gates.

        `levels` is the largest cohort so far: every share is a multiple of one over a cohort.
        """
        layout = self.layout(model.manifest)
        return {
            "share": self._first_mask(layout, seed).astype(np.float32),
            "averaged": np.zeros(layout.masked, np.uint32),
            "levels": np.ones(1, np.uint32),
            "real": model.parameters[layout.real],
        }

    def _first_mask(self, layout: Layout, seed: int) -> Bits:
        if self.initial_mask == "ones":
            return np.ones(layout.masked, np.bool_)
        top = counter.uint64(counter.key(seed, "fedmask", "first mask"), layout.masked) >> np.uint64(63)
        first: Bits = top.astype(np.bool_)
        return first

    def downlink(self, a: Assignment, state: Arrays, record: Arrays) -> Payload:
        """The live elements of the structure the server has of this device, which it names; all of them if none."""
        layout = self.layout(a.model.manifest)
        steps, levels = self._due(a, layout, state, record)
        meta: dict[str, Meta] = {"structure": bits_digest(record["structure"]) if record else "", "levels": levels}
        arrays: Arrays = {}
        if self._down_by_change:
            if record:
                meta["reference"] = bits_digest(record["bits"])
                known = bitset.unpack(record["bits"], layout.live)
            else:
                known = self._first_mask(layout, a.seed)
            arrays[self.changes] = u8(codecs.encode(self.codec, known ^ (steps > 0), known.size))
        else:
            arrays[PLANES] = bitset.pack_planes(steps, levels.bit_length())
        if layout.real.size:
            arrays["real"] = state["real"]
        return Payload(arrays, meta)

    def _due(self, a: Assignment, layout: Layout, state: Arrays, record: Arrays) -> tuple[NDArray[np.uint32], int]:
        """The share of every element the device is due, in steps of one over the levels, and the levels."""
        share = state["share"]
        if record:
            live = _live(layout, record["structure"])
            if self.state == "client":
                share = bitset.unpack(state[f"mask.{a.device}"], layout.masked)[live].astype(np.float32)
            else:
                own = bitset.unpack(record["bits"], layout.live)
                share = np.where(state["averaged"][live] >= record["round"], share[live], own)
        levels = int(state["levels"][0]) if self.down == "count" else 1
        return np.floor(share.astype(np.float64) * levels + 0.5).astype(np.uint32), levels

    def exchanged(self, model: Model) -> int:
        """Mask elements and real gates."""
        layout = self.layout(model.manifest)
        return layout.masked + layout.real.size

    def paper_bytes(self, model: Model) -> tuple[int, int] | None:
        """One bit for every mask element, pruned or not."""
        layout = self.layout(model.manifest)
        dense = bitset.size(layout.masked) + 4 * layout.real.size
        return dense, dense

    def update_limit(self, model: Model) -> int:
        """Live bits, as no exact codec needs more, the structure, the real gates."""
        layout = self.layout(model.manifest)
        return bitset.size(layout.live) + CODEC_HEAD + bitset.size(layout.thinned) + 4 * layout.real.size

    def read_update(self, a: Assignment, state: Arrays, record: Arrays, update: Payload) -> Arrays:
        """`bits` packed over the live elements, `structure` packed over the prunable ones, `real` float32."""
        layout = self.layout(a.model.manifest)
        mask = MASK if self.codec == "bits" else self.changes
        due = {mask, "real"} if layout.real.size else {mask}
        if set(update.arrays) - {STRUCTURE} != due:
            raise PayloadError(f"the payload holds arrays {sorted(update.arrays)}; FedMask sends {sorted(due)}")
        structure = update.arrays.get(STRUCTURE, record.get("structure"))
        if structure is None:
            raise PayloadError(f"the server has no structure of this device yet; send `{STRUCTURE}` with the update")
        try:
            held = bitset.unpack(structure, layout.thinned)
            if self.codec == "bits":
                bitset.unpack(update.arrays[MASK], layout.live)
        except ValueError as error:
            raise PayloadError(f"a bit array of the update is malformed: {error}") from None
        if (counts := layout.counts(held)) != layout.kept:
            raise PayloadError(
                f"the structure keeps {list(counts)} elements; keep = {self.keep:g} and rank = {self.rank!r} "
                f"keep {list(layout.kept)}"
            )
        if update.meta.get("structure") != bits_digest(structure):
            raise PayloadError(
                f"the update is for structure {update.meta.get('structure')!r}, the server has "
                f"{bits_digest(structure)!r}; send the structure again"
            )
        real = update.arrays.get("real", np.zeros(0, np.float32))
        if real.dtype != np.float32 or real.shape != layout.real.shape or not np.isfinite(real).all():
            raise PayloadError(f"`real` must be {layout.real.size} finite float32 values")
        if self.codec == "bits":
            return {"bits": update.arrays[MASK], "structure": structure, "real": real}
        known = self._reference(a, layout, state, record, update, _live(layout, structure))
        try:
            flips = codecs.decode_mask(self.codec, coded(update, self.changes, (STRUCTURE, "real")), layout.live)
        except CodecError as error:
            raise PayloadError(f"the changes of device {a.device!r} in round {a.round}: {error}") from None
        return {"bits": bitset.pack(known ^ flips), "structure": structure, "real": real}

    def _reference(
        self, a: Assignment, layout: Layout, state: Arrays, record: Arrays, update: Payload, live: Bits
    ) -> Bits:
        """The bits of the live elements that an update changes, by their name. Raises PayloadError."""
        steps, levels = self._due(a, layout, state, record)
        received = np.zeros(layout.masked, np.bool_)
        received[_live(layout, record["structure"]) if record else slice(None)] = 2 * steps >= levels
        said = update.meta.get("reference")
        for mask in (received, self._first_mask(layout, a.seed)):
            if bits_digest(bitset.pack(mask[live])) == said:
                known: Bits = mask[live]
                return known
        raise PayloadError(
            f"the changes of device {a.device!r} in round {a.round} are to bits {said!r}, which the server has not "
            "sent; start the client again to train the round anew"
        )

    def fold(self, a: Assignment, state: Arrays, total: Total, update: Arrays, record: Arrays) -> tuple[Total, Arrays]:
        """Count ones and holders of every element; remember the device's structure and bits."""
        layout = self.layout(a.model.manifest)
        if not total:
            total = {
                "ones": Tally(layout.masked),
                "holders": Tally(layout.masked),
                "real": np.zeros(layout.real.size, np.float64),
                "updates": np.zeros(1, np.uint32),
            }
        live = _live(layout, update["structure"])
        dense = np.zeros(layout.masked, np.bool_)
        dense[live] = bitset.unpack(update["bits"], layout.live)
        mask = bitset.pack(dense)
        total["ones"].add(mask)
        total["holders"].add(bitset.pack(live))
        total["real"] += update["real"]
        total["updates"] += np.uint32(1)
        if self.state == "client":
            total[f"mask.{a.device}"] = mask
        record = {"structure": update["structure"], "bits": update["bits"], "round": np.array([a.round], np.uint32)}
        return total, record

    def finish(self, model: Model, round_: int, state: Arrays, total: Total) -> Arrays:
        """Average what two or more devices hold; everything else stays."""
        if not total:
            return state
        holders = total["holders"].counts()
        shared = holders >= 2
        mean = total["ones"].counts() / np.maximum(holders, 1)
        state = {
            **state,
            "real": (total["real"] / total["updates"][0]).astype(np.float32),
            "levels": np.maximum(state["levels"], total["updates"]),
        }
        if self.state == "global":
            state["share"] = np.where(shared, mean, state["share"]).astype(np.float32)
            state["averaged"] = np.where(shared, round_, state["averaged"]).astype(np.uint32)
        for name in (n for n in total if n.startswith("mask.")):
            own = bitset.unpack(total[name], shared.size)
            state[name] = bitset.pack(np.where(shared, mean >= 0.5, own))
        return state

    # --- client half

    def local_round(self, task: Task, kept: Arrays, downlink: Payload) -> Local:
        """Prune if this is the first round, then a few epochs of score SGD from the received bits."""
        layout = self.layout(task.assignment.model.manifest)
        share, known = self._received(task, layout, kept, downlink)
        values, buffers = self._values(task, layout, kept, downlink)
        if "structure" in kept:
            structure = kept["structure"]
        else:
            structure = bitset.pack(self._prune(task, layout, values, buffers, share))
        live = _live(layout, structure)
        scores = self._scores(kept, share, live)
        loss = self._train(task, layout, values, buffers, scores, self.epochs, "train")
        mask = scores >= 0

        named = bits_digest(structure)
        packed = bitset.pack(mask[live])
        arrays, meta = self._update(packed, mask[live], known[live])
        if downlink.meta.get("structure") != named:
            arrays[STRUCTURE] = structure
        if layout.real.size:
            arrays["real"] = values[layout.real]
        keep: Arrays = {"structure": structure, "bits": packed, "local": values[layout.local]}
        keep["buffers"] = buffers
        if self.restart == "latent":
            keep["scores"] = scores
        trained = self._personal(task, layout, values, buffers, mask)
        return Local(keep, Payload(arrays, {**meta, "structure": named}), trained, loss)

    def _update(self, packed: NDArray[np.uint8], mask: Bits, known: Bits) -> tuple[Arrays, dict[str, Meta]]:
        """The live bits as they are, or what they change in those the server knows too, which are named."""
        if self.codec == "bits":
            return {MASK: packed}, {}
        flips = u8(codecs.encode(self.codec, mask ^ known, mask.size))
        return {self.changes: flips}, {"reference": bits_digest(bitset.pack(known))}

    def personal(self, task: Task, kept: Arrays, downlink: Payload) -> Personal:
        """The frozen weights under the received mask, within the device's structure when it has one."""
        layout = self.layout(task.assignment.model.manifest)
        share, _ = self._received(task, layout, kept, downlink)
        return self._personal(task, layout, *self._values(task, layout, kept, downlink), share >= 0.5)

    def _received(self, task: Task, layout: Layout, kept: Arrays, downlink: Payload) -> tuple[F32, Bits]:
        """The share of every mask element, float32[masked], 0 outside the device's own structure, and bool[masked]:
        at live elements, bits that the server knows too.

        A downlink is coded for the structure, and against the bits, that the server has of this device. When those
        are others (the device's storage was wiped, say) it cannot be read: the device goes on from its own bits, or
        afresh, and what both know is the first mask.
        """
        own, named = kept.get("structure"), downlink.meta.get("structure")
        first = self._first_mask(layout, task.assignment.seed)
        if not named:
            share = self._shares(downlink, first)
            return share if own is None else np.where(_live(layout, own), share, np.float32(0)), share >= 0.5
        if own is None:
            return first.astype(np.float32), first
        live, last = _live(layout, own), bitset.unpack(kept["bits"], layout.live)
        share = np.zeros(layout.masked, np.float32)
        readable = not self._down_by_change or downlink.meta.get("reference") == bits_digest(kept["bits"])
        if named == bits_digest(own) and readable:
            share[live] = self._shares(downlink, last)
            return share, share >= 0.5
        share[live] = last
        return share, first

    def _shares(self, downlink: Payload, last: Bits) -> F32:
        """The shares that a downlink carries, float32 in 0..1, as many as the bits it may change. PayloadError."""
        if self._down_by_change:
            try:
                flips = codecs.decode_mask(self.codec, coded(downlink, self.changes, ("real",)), last.size)
            except CodecError as error:
                raise PayloadError(f"the downlink's changes are malformed: {error}; fetch it again") from None
            return (last ^ flips).astype(np.float32)
        levels = downlink.meta.get("levels")
        if not isinstance(levels, int) or not 1 <= levels < 2**20 or PLANES not in downlink.arrays:
            raise PayloadError(
                f"the downlink has levels {levels!r} and arrays {sorted(downlink.arrays)}; fetch it again"
            )
        try:
            steps = bitset.unpack_planes(downlink.arrays[PLANES], levels.bit_length(), last.size)
        except ValueError as error:
            raise PayloadError(f"the downlink's mask is malformed: {error}; fetch it again") from None
        shares: F32 = np.minimum(steps / np.float32(levels), np.float32(1)).astype(np.float32)
        return shares

    def _values(self, task: Task, layout: Layout, kept: Arrays, downlink: Payload) -> tuple[F32, F32]:
        """Copies of all parameters (masked ones as drawn) and statistics: the device's own, the server's real gates."""
        model = task.assignment.model
        values = model.parameters.copy()
        if layout.real.size:
            real = downlink.arrays.get("real")
            if real is None or real.dtype != np.float32 or real.shape != layout.real.shape:
                raise PayloadError(f"the downlink lacks `real`, {layout.real.size} float32 values; fetch it again")
            values[layout.real] = real
        if "local" in kept:
            values[layout.local] = kept["local"]
        return values, kept.get("buffers", model.buffers).copy()

    def _scores(self, kept: Arrays, share: F32, live: Bits) -> F32:
        """Real scores from received shares; -inf is dead: its bit is 0 and no gradient reaches it."""
        scores: F32 = np.float32(self.radius) * (2 * share - 1)
        if "scores" in kept and self.restart == "latent":
            own = kept["scores"]
            scores = np.where((own >= 0) == (share >= 0.5), own, scores)
        scores[~live] = -np.inf
        return scores

    def _prune(self, task: Task, layout: Layout, values: F32, buffers: F32, share: F32) -> Bits:
        """The device's structure, bool over the prunable elements: the largest |W (s_after - s_before)| of one epoch.

        Ties go to the lower index. What stays on the device (head, biases, statistics) profits from the epoch too.
        """
        if not layout.kept:
            return np.zeros(0, np.bool_)
        live = np.ones(layout.masked, np.bool_)
        scores = self._scores({}, share, live)
        before = scores.copy()
        self._train(task, layout, values, buffers, scores, 1, "prune")
        change = np.abs(scores - before)
        weights = task.assignment.model.parameters
        for b in layout.blocks:
            change[b.at] *= np.abs(weights[b.span])
        live[layout.prunable] = False
        for spans, count in zip(layout.ranked, layout.kept, strict=True):
            index = np.concatenate([np.arange(s.start, s.stop) for s in spans])
            live[index[np.argsort(-change[index], kind="stable")[:count]]] = True
        return live[layout.prunable]

    def _train(
        self, task: Task, layout: Layout, values: F32, buffers: F32, scores: F32, epochs: int, phase: str
    ) -> float:
        """SGD on `scores` and on the float32 parameters in `values`, in place; the masked spans of it are scratch."""
        frozen = task.assignment.model.parameters
        free = np.concatenate([layout.real, layout.local])
        free_sgd = Sgd(free.size, self.local_lr, self.momentum)
        masked = [
            (
                b.span,
                masked_sgd(
                    frozen[b.span], scores[b.at], values[b.span], b.shape, self.lr, self.momentum, self.group_lasso
                ),
            )
            for b in layout.blocks
        ]

        def step(gradient: F32) -> None:
            for span, layer in masked:
                layer.step(gradient[span])
            moved = values[free]
            free_sgd.step(moved, gradient[free])
            values[free] = moved

        return train(task, buffers, lambda: values, step, epochs, self.batch, phase)

    def _personal(self, task: Task, layout: Layout, values: F32, buffers: F32, mask: Bits) -> Personal:
        frozen, values = task.assignment.model.parameters, values.copy()
        alive = np.ones(values.size, np.bool_)
        for b in layout.blocks:
            alive[b.span] = mask[b.at]
            values[b.span] = frozen[b.span] * mask[b.at]
        return Personal(values, buffers, alive)
