"""What is said of methods that end badly: which base they miss, and what most often helps."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

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


def warnings(
    records: Mapping[str, Record],
    methods: Mapping[str, Method],
    tested: int = FEW,
    model: Model | None = None,
    chosen: bool = False,
) -> list[str]:
    """Sentences on methods that end badly or should have pruned, and on updates that the guard limited.

    A method ends badly when it scores below the bundle's own start, below Standalone, or more than `MISSED` below its
    `rival`, as far as these ran; else below half of the best method. This holds for Standalone too. With `tested` test
    samples of all devices, fewer than `FEW`, a gap of up to two standard errors of a share, ``tested ** -0.5``, says
    nothing. Both mappings have the same labels. `model` is the bundle's, where it is at hand. `chosen`: each device
    chose its model by validation samples.
    """
    alone = next((label for label in records if methods[label].name == ALONE), None)
    scores = {label: r["score_mean"] for label, r in records.items() if r["score_mean"] is not None}
    unsure = tested**-0.5 if 0 < tested < FEW else 0.0
    found = []
    for label, r in records.items():
        if limited := guard.said(r.get("guarded", 0)):
            found.append(f"{label}: {limited}")
        if r.get("kept_share") == 1 and (unpruned := methods[label].unpruned()):
            found.append(f"{label}: {unpruned}")
        if label not in scores:
            continue
        after, hints = r.get("score_mean_after_local_epochs"), _hints(label, methods, alone, model)
        for base, due in _missed(label, r["score_start"], scores, methods, alone, unsure).items():
            own = [PERSONAL.format(after)] if not chosen and after is not None and after >= due else []
            found += [said] if (said := below(label, scores[label], due, base, [*own, *hints])) else []
    return found


def _missed(
    label: str,
    start: float | None,
    scores: Mapping[str, float],
    methods: Mapping[str, Method],
    alone: str | None,
    unsure: float,
) -> dict[str, float]:
    """What the method of this label should have reached and did not: by its name, what it scores."""
    score, missed = scores[label], dict[str, float]()
    if start is not None and score < start - unsure:
        missed["the bundle's own start"] = start
    if alone is not None and alone in scores and score < scores[alone] - unsure:
        missed["training alone"] = scores[alone]
    rivals = [other for other in scores if methods[other].name == methods[label].rival]
    rival = max(rivals, key=scores.__getitem__, default=label)
    if score < scores[rival] - max(unsure, MISSED):
        missed[f"{rival}'s score"] = scores[rival]
    best = max(scores, key=scores.__getitem__)
    if not missed and scores[best] > 0 and score < scores[best] / 2 - unsure:
        missed[f"half of {best}'s score"] = scores[best]
    return missed


def _hints(label: str, methods: Mapping[str, Method], alone: str | None, model: Model | None) -> list[str]:
    """What most often helps the method of this label, with its rate and with what training alone has more of."""
    method, other = methods[label], methods[alone or label]
    hints = list(method.hints(model))
    if 0 < _steps(method) < _steps(other):
        differ = [k for k in ("epochs", "batch") if getattr(method, k) != getattr(other, k)]
        as_many = " and ".join(f"{name} = {getattr(other, name)}" for name in differ)
        here = " and ".join(f"{getattr(method, name)}" for name in differ)
        at = hints.index(MORE_EPOCHS) if MORE_EPOCHS in hints else 0
        hints.insert(at, f"{as_many}, as {alone} has (here {here})")
        hints = [hint for hint in hints if hint != MORE_EPOCHS or "epochs" not in differ]
    rate = getattr(method, "lr", None)
    if isinstance(method, LocalSgd) and not rate:  # the method chooses it by the model
        rate = method.usual_lr if model is None else method.learning_rate(model)
    return [f"lr (here {rate:g})" if rate and hint == "lr" else hint for hint in hints]


def _steps(method: Method) -> float:
    """How often a method's local training steps on a sample in a round; 0 where it has no such epochs or batch."""
    epochs, batch = (getattr(method, key, None) for key in ("epochs", "batch"))
    return epochs / batch if epochs and batch else 0.0


def warn(console: Console, sentences: list[str]) -> None:
    """Print a paragraph for each sentence, after an empty line."""
    if sentences:
        console.print("", *map(_paragraph, sentences), sep="\n", markup=False)


def _paragraph(sentence: str) -> str:
    """A warning in lines of 79 columns; a path or another long word is not broken."""
    text = f"warning: {sentence}"
    return textwrap.fill(text, 79, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
