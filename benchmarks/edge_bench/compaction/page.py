"""`docs/compaction.md` from the committed results: ``python -m edge_bench.compaction.page``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_bench.compaction import sections
from edge_bench.compaction.suite import EXACT, NEAR, Result, summary
from edge_bench.compaction.zoo import FAMILIES

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "compaction"
PAGE = ROOT / "docs" / "compaction.md"
Row = Mapping[str, Any]

HEAD = """# Compaction

A device ends with a mask. `maskfleet join` cuts the masked model down to what the mask leaves and writes
`personal.onnx`; `maskfleet compact BUNDLE VALUES --out FILE` does the same for values from elsewhere. The small model's
outputs are the masked model's: they are compared before the file is written, and a model that differs is not.

## What goes

Compaction runs `eval.onnx` on facts about every element instead of on numbers: does it vary with the input, which
constant is it otherwise, and does an output depend on it. What does not vary or is not read is not computed.

* A pruned channel goes with its filter, bias, batch-norm row and every reader's slice. What it still emits is found by
  running its own operators on that constant, and goes into the readers' biases. Where zero padding gives the constant
  a border, a small map is added.
* Layers that meet in a sum or a concatenation keep different channels. Each layer is cut by its own mask, and a gather
  or a padding brings the channels together.
* Which entries of which tensors belong to one channel follows from the graph's own operators. So splits, shuffles,
  depthwise and grouped convolutions, gates, skips, shared layers, attention heads, LSTM, GRU and RNN need no list.

What stays although its mask would let it go:

* **Norms over channels** (layer norm, group norm, softmax or a length over channels): a constant channel takes part in
  the mean and the deviation. The layers before it are cut, the norm reads all its channels. A group norm is computed
  without those of its groups that are gone as a whole.
* **Heads**: all heads of an attention are computed at once, so each is as wide as the widest; those that are gone as a
  whole are left out. An operator that takes heads only of the same entries, as the rotation of pairs by their positions
  does, keeps more: its halves, in another order, would need a gather of their own in each head.
* **Attention under masks that leave biases**: a pruned query entry is a constant, not zero, so its product with the
  keys stays. A pruned key entry cancels in the softmax, and the average of a pruned value entry is that constant. Where
  a product mixes the heads' scores before the softmax, the key entries stay.
* **Recurrent layers under masks that leave biases**: a pruned unit's state is constant for all inputs but moves from
  step to step. What it adds goes through further inputs of an LSTM or RNN. Of a GRU, whose reset gate multiplies the
  recurrent sum, a few pruned units stay for the others, or new units, no more than live ones, carry that sum.
* **Starts of decoders**: a unit without weights carries a start that depends on the input from step to step.
* **Choices**: of a maximum or a condition both sides are computed unless one is settled.

Each of these but the last has a line in the report (`stays:`), with the layer and the operator. Where an operator
cannot be written on fewer channels at all, the layers before it stay whole, with a line, and the others are cut.

Where a reshape merges the batch with another axis (the heads of an attention, windows of an image, the rows of a
sequence), the part up to the reshape that undoes it is written with the batch in an axis of its own. A constant that
differs within a merged axis, such as a position of a frame, counts as varying elsewhere.

A file has no more parameters than are not zero in the dense model, where pruned channels emit zero and no heads or
steps are padded or unrolled. Where they emit a constant it may have more: the maps of these constants are parameters.
It has fewer than the dense model, except for constants of the graph that no bundle counts, such as a causal mask.

`personal.onnx` is refused, and the masked dense model written instead, when the two models' outputs differ.

Memory: facts that hold for a whole channel are stored once, so a run of the graph on two samples needs the most. A
MobileNetV2 on 96x96 pixels is compacted in 0.56 GB.

## What a device trains

A method may remove channels before the end. The device then trains the smaller network: `train.onnx` and `eval.onnx`
are cut in memory when the channels change. This is another cut than the one above:

| | end of a federation | during the rounds |
| --- | --- | --- |
| what goes | what does not vary or is not read, of any mask | channels of the manifest's groups, all places at once |
| what it emitted | goes into biases and maps | counts as zero |
| weights | constants of the graph | inputs of the graph, smaller |
| nodes | written anew | the same, on smaller tensors |
| operators | each is run to see what it does | `edge_client/graph/axes.py` pairs the axes that go together |
| code | `edge_client/compaction/` | `edge_client/training/cut.py`, `cut_rules.py` |

Groups are found once, by the export, which cuts every graph by half of each group's channels, and by all but one, as a
trial. The outputs and a step's gradients must be the whole network's with zeros in what is cut; a gradient may differ
in one draw of six, as where an activation lies at its threshold. Dropout drops the same entries in both. Samples are
normal numbers, and such numbers times 100; what a network does only beyond them, such as behind a threshold of 1,000,
is not tried. A group that fails is named in the manifest under `stopped`, with the operator or the reason. These can be
cut: linear layers, embeddings, convolutions (also depthwise, grouped by whole groups, and transposed; with any
padding), batch-norms, sums and shortcuts padded with channels, shuffles, heads of an attention, also behind padding
masks, rotary positions, places beside the queries and learned queries, maxima and weighted sums over steps, lengths and
distances, layers that gates weigh, weights computed of others (the rows of standardised filters, `weight_norm`,
mixtures of kernels, prototypes of length 1), and units of LSTM, GRU and RNN, alike in both directions, or of loops over
their cells. The channels that a group norm takes together leave together; under a norm over all channels none leaves.
If all groups together fail, each is tried with those kept before it.

A test compares the table with trial runs. A trial covers operators that the table lacks, but it runs each many
times on values of full size, too slow for a device that cuts a graph of 1,700 nodes in the middle of a federation. The
table refuses what it lacks.

## How wide

ONNX Runtime's blocked convolutions read multiples of 4 channels, unless they are fewer than a block of 16, and cost the
same for all outputs within a block. `--align` sets how wide the layers are:

| `--align` | widths |
| --- | --- |
| `rule` | multiples of 16 at depthwise convolutions, of 4 where others read more than 16 channels; the default |
| `none` | what the mask leaves |
| `auto` | what runs fastest on this device |

A pruned channel that stays changes nothing: its rows are as masked. The channels of a sum are filled up with zeros. One
side of a sum writes the channels of the other as zeros where that fills its last block. So the widths of `rule` follow
from shapes alone, and every device writes the same bytes for the same model.

`auto` times up to six whole models in turns, from as narrow as possible to all channels, among them the rule's. The
fastest is taken, so the model is no slower than any of them, the dense one included. Its bytes depend on the clock.

No other choice has more multiply-adds than the dense model. Where it would, as further inputs and units of recurrent
layers can make it, the narrowest model is written, and where that has more too, the dense one.

## What bounds the speed

* **Small networks** (EMNIST CNN, LeNet, MLP): the operators' own cost. EMNIST CNN has nine operators; starting them
  takes as long as their arithmetic. Its first layer reads one channel; its 10 outputs fill one block of 16, as 5 do.
* **ResNet-20, ResNet-56**: a third of the multiply-adds is in layers of 16 channels, one block, which costs the same
  at 8. Sums of different channels add copies: a padding, and where a side cannot write the other's channels a gather.
* **VGG under masks that leave biases**: zero padding gives what pruned channels emit a border. A map is added after
  each convolution, outside its fused activation.
* **LSTM**: the ratio of multiply-adds itself at half the units. Below, the steps of the recurrence.
* **Transformers**: norms read all channels, so the stream between the blocks keeps its width. Softmax, norms and moves
  keep their time.

"""

METHOD = f"""
## Measured

`python -m edge_bench.compaction --family FAMILY --json benchmarks/results/compaction/FAMILY.json` compacts graphs with
random masks. Each layer prunes channels of its own, so layers under one sum disagree about most of them. `act` masks
zero a channel's row, bias and batch-norm; `weight` masks zero its row alone. `kept` is the share of channels that each
layer keeps.

* **error**: the largest difference from the masked module in float64, over the standard deviation of its outputs.
  A model counts as exact up to {EXACT:g}, or up to twice the rounding of the dense graph in float32.
* **bound**: multiply-adds when every contraction counts only entries that vary with the input and that the outputs'
  gradient reaches, found numerically in PyTorch without the exporter or compaction (`edge_bench.compaction.oracle`).
  Of an LSTM, GRU or RNN it is what one dense layer needs: an input more, or in a GRU behind the reset gate a unit more,
  for each dimension of what dead units add over time.
  A model is at the bound with at most {100 * (NEAR - 1):.0f} % more.
* **time**: processor time of one sample on one thread, median of calls in turns. Other processes shared the machine.
"""


def stored(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The results by family: of `FAMILY.json` and `FAMILY-*.json`, a graph from the last file that has it."""
    found = {}
    for family in FAMILIES:
        files = [json.loads(p.read_text()) for p in sorted(folder.glob(f"{family}*.json"), key=lambda p: p.stem)]
        own = {r["model"]: [o for o in f["rows"] if o["model"] == r["model"]] for f in files for r in f["rows"]}
        if files:
            rows = [r for several in own.values() for r in several]
            found[family] = {**files[-1], "rows": rows, "summary": summary([Result(**r) for r in rows])}
    return found


def page(folder: Path = RESULTS) -> str:
    """The page's text."""
    found = stored(folder)
    parts = [HEAD.rstrip("\n"), METHOD.rstrip("\n"), ""]
    parts += ["| family | graphs | exact | at the bound | refused | crashed | wrong |", "| --- " * 7 + "|"]
    for family, result in found.items():
        s = result["summary"]
        counts = [s["graphs"], s["exact"], s["at_the_bound"], *(len(s[k]) for k in ("refused", "crashed", "wrong"))]
        parts.append(f"| {family} | " + " | ".join(map(str, counts)) + " |")
    parts += ["", "Above the bound, compact over bound in the worst row of each kind of mask:", ""]
    parts += ["| graph | act | weight |", "| --- | --- | --- |"]
    for result in found.values():
        for name in result["summary"]["above_the_bound"]:
            factors = [_worst(result["rows"], name, kind) for kind in ("act", "weight")]
            parts.append(f"| {name} | " + " | ".join(factors) + " |")
    known = found.get("known", {}).get("rows", [])
    timed = [r for r in known if r.get("speedup")]
    if timed:
        machine = found["known"]["machine"]
        engine = f"ONNX Runtime {machine['onnxruntime']} on {machine['processor']}"
        parts += ["", f"Published networks in {engine}, dense over compact; ms are dense and auto:", ""]
        parts += ["| network | mask | kept | multiply-adds | bound | narrowest | auto | ms |", "| --- " * 8 + "|"]
        parts += _speeds(timed)
    parts += _beside(folder / "peers.json")
    parts += sections.trained(folder) + sections.engines(folder)
    return "\n".join(parts) + "\n"


def _beside(path: Path) -> list[str]:
    """The table of Torch-Pruning's models beside ours; nothing without its file."""
    if not path.is_file():
        return []
    parts = [
        "",
        "Beside Torch-Pruning at the same kept share, timed in the same turns (`--peers`). It chooses the channels,",
        "the same ones for all layers under a sum, so its outputs are not ours. `rounded` has its `round_to` 16:",
        "",
        "| network | kept | ours narrowest | ours auto | Torch-Pruning | rounded |",
        "| --- " * 6 + "|",
    ]
    rows = json.loads(path.read_text())["rows"]
    for name, kept in dict.fromkeys((r["model"], r["kept"]) for r in rows):
        own = [r for r in rows if (r["model"], r["kept"]) == (name, kept)]
        cells = []
        for tool in ("maskfleet", "torch-pruning"):
            for aligned in (False, True):
                found = [r["speedup"] for r in own if r["tool"] == tool and r["aligned"] == aligned and "speedup" in r]
                cells.append(f"{found[0]:.2f}x" if found else "-")
        parts.append(f"| {name} | {kept} | " + " | ".join(cells) + " |")
    return parts


def _worst(rows: Sequence[Row], name: str, kind: str) -> str:
    own = [r for r in rows if r["model"] == name and r["mask"] == kind and not r["aligned"] and r["status"] == "ok"]
    factors = [r["macs_compact"] / max(1, r["macs_bound"]) for r in own]
    return f"{max(factors):.2f}" if factors else "-"


def _speeds(rows: Sequence[Row]) -> list[str]:
    made = []
    for r in rows:
        if r["aligned"] or r["tool"] != "maskfleet":
            continue
        same = [o for o in rows if o["aligned"] and all(o[k] == r[k] for k in ("model", "mask", "kept", "tool"))]
        auto, ms = (f"{same[0]['speedup']:.2f}x", same[0]["ms"]) if same else ("-", r["ms"])
        made.append(
            f"| {r['model']} | {r['mask']} | {r['kept']} | {r['mac_ratio']:.2f}x | {r['mac_bound']:.2f}x | "
            f"{r['speedup']:.2f}x | {auto} | {r['ms_dense']:.3g} -> {ms:.3g} |"
        )
    return made


if __name__ == "__main__":
    PAGE.write_text(page())
