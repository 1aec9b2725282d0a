"""What is said of methods that end badly: which base they miss, and what most often helps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

from rich.console import Console

from coord_server import guard
from edge_bench.records import Record
from edge_client.bundle import Model
from edge_client.methods import MORE_EPOCHS, Method, below
from edge_client.methods.shared.local_sgd import LocalSgd

ALONE = "standalone"  # the method of devices that train for themselves
FEW = 100  # test samples
PERSONAL = "a model of each device's own, by validation samples and personalise = 'best' (after local epochs: {:.3f})"
MISSED = 0.03  # three points: a method that ends further below its rival is named


def _advice(hints: Sequence[str], own: int | None, other: str, epochs: int | None) -> Sequence[str]:
    """The hints; one of them or the first is the number of `epochs` that the method `other` has, if more than `own`."""
    if own is None or epochs is None or own >= epochs:
        return hints
    at, found = (hints.index(MORE_EPOCHS), 1) if MORE_EPOCHS in hints else (0, 0)
    return [*hints[:at], f"epochs = {epochs}, as {other} has (here {own})", *hints[at + found :]]


def _rate(method: Method, model: Model | None) -> float | None:
    """The method's learning rate, also where the settings leave it to the method; None where that has none to name."""
    if isinstance(method, LocalSgd):
        return method.lr or (method.usual_lr if model is None else method.learning_rate(model))
    return getattr(method, "lr", None)


def warnings(
    records: Mapping[str, Record], methods: Mapping[str, Method], tested: int = FEW, model: Model | None = None
) -> list[str]:
    """Sentences on methods that end badly or should have pruned, and on updates that the guard limited.

    A method ends badly when it scores below the bundle's own start, below Standalone, or more than `MISSED` below its
    `rival`, as far as these ran; else below half of the best method. This holds for Standalone too. With `tested` test
    samples of all devices, fewer than `FEW`, a gap of up to two standard errors of a share, ``tested ** -0.5``, says
    nothing. Both mappings have the same labels. `model` is the bundle's, where it is at hand.
    """
    alone = next((label for label in records if methods[label].name == ALONE), None)
    scores = {label: r["score_mean"] for label, r in records.items() if r["score_mean"] is not None}
    best, least = max(scores, key=scores.__getitem__, default=None), tested**-0.5 if 0 < tested < FEW else 0.0
    found = []
    for label, r in records.items():
        score, bases = r["score_mean"], {"the bundle's own start": r["score_start"]}
        if alone is not None and alone != label:
            bases["training alone"] = records[alone]["score_mean"]
        if limited := guard.said(r.get("guarded", 0)):
            found.append(f"{label}: {limited}")
        if r.get("kept_share") == 1 and (unpruned := methods[label].unpruned()):
            found.append(f"{label}: {unpruned}")
        if score is None:
            continue
        worse = {than: base for than, base in bases.items() if base is not None and score < base - least}
        rivals = [other for other in scores if methods[other].name == methods[label].rival]
        rival = max(rivals, key=scores.__getitem__, default=None)
        if rival is not None and score < scores[rival] - max(least, MISSED):
            worse[f"{rival}'s score"] = scores[rival]
        if not worse and best is not None and scores[best] > 0 and score < scores[best] / 2 - least:
            worse[f"half of {best}'s score"] = scores[best]
        after, hints = r.get("score_mean_after_local_epochs"), _hints(label, methods, alone, model)
        for than, base in worse.items():
            own_model = [PERSONAL.format(after)] if after is not None and after >= base else []
            found += [said] if (said := below(label, score, base, than, [*own_model, *hints])) else []
    return found


def _hints(label: str, methods: Mapping[str, Method], alone: str | None, model: Model | None) -> Sequence[str]:
    """What most often helps the method of this label, with its rate and with how many epochs training alone has."""
    hints: Sequence[str] = methods[label].hints(model)
    if alone is not None and alone != label:
        own, epochs = (getattr(methods[which], "epochs", None) for which in (label, alone))
        hints = _advice(hints, own, alone, epochs)
    rate = _rate(methods[label], model)
    return [f"lr (here {rate:g})" if rate and hint == "lr" else hint for hint in hints]


def warn(console: Console, sentences: list[str]) -> None:
    """Print a paragraph for each sentence, after an empty line."""
    if sentences:
        console.print("", *map(_paragraph, sentences), sep="\n", markup=False)


def _paragraph(sentence: str) -> str:
    """A warning in lines of 79 columns; a path or another long word is not broken."""
    text = f"warning: {sentence}"
    return textwrap.fill(text, 79, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
