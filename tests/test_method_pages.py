"""Every method has a page with every setting, its default and all that travels; the pages have no other settings."""

from __future__ import annotations

import json
import re
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from edge_bench.testing import digits
from edge_bench.testing.methods import middle
from pydantic_core import PydanticUndefined

from edge_client.commands import method_inspection
from edge_client.errors import ConfigError
from edge_client.methods import Method
from edge_client.methods.shared.local_sgd import CAREFUL, LocalSgd
from edge_client.protocol import payload

PAGES = Path(__file__).parents[1] / "docs" / "methods"
METHODS = {e.name: e for e in entry_points(group="maskfleet.methods") if e.value.startswith("edge_client.")}
ROW = re.compile(r"^\|(.+?)\|(.*?)\|.*\|$", re.MULTILINE)
INHERITED = re.compile(r"all (?:other )?settings of \[.+?\]\((\w+)\.md[^)]*\)(.*)")


def settings(name: str) -> dict[str, str]:
    """By setting its default as the page's tables of settings have it, those of pages that they point to first."""
    own, inherited = {}, {}
    for table in re.findall(
        r"^\| setting \|.*\n\|[-|]+\n((?:\|.*\n)+)", (PAGES / f"{name}.md").read_text(), re.MULTILINE
    ):
        for first, default in ROW.findall(table):
            if (other := INHERITED.search(first)) is not None:
                without = set(re.findall(r"`(\w+)`", other[2]))
                inherited |= {k: v for k, v in settings(other[1]).items() if k not in without}
                continue
            names, texts = re.findall(r"`([\w.]+)`", first), re.split(r", (?![^\[{]*[\]}])", default.strip())
            own |= dict(zip(names, texts * len(names) if len(texts) == 1 else texts, strict=True))
    return inherited | own


def written(text: str) -> object:
    """A default as its page writes it; other words than a value stand for themselves."""
    try:
        return json.loads(text.strip("`"))
    except ValueError:
        return text


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_s_page_has_every_setting_with_its_default(name: str) -> None:
    method, page = METHODS[name].load(), settings(name)
    assert issubclass(method, Method)
    assert {k for k in page if "." not in k} == set(method.model_fields), f"docs/methods/{name}.md"
    for setting, field in method.model_fields.items():
        default = field.default_factory() if field.default is PydanticUndefined else field.default
        text = page[setting]
        if setting == "lr" and issubclass(method, LocalSgd):
            assert text == f"{method.usual_lr:g} or {CAREFUL * method.usual_lr:g}"
        if default is None or default == ():  # it follows from the bundle, or stands for all or nothing
            assert text in ("none", "all", "`[]`") or " or " in text, (setting, text)
        else:
            assert written(text) == (list(default) if isinstance(default, tuple) else default), (setting, text)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_s_page_or_one_that_it_links_to_names_what_its_payloads_hold(name: str) -> None:
    page = (PAGES / f"{name}.md").read_text()
    text = page + "".join((PAGES / f"{other}.md").read_text() for other in set(re.findall(r"\((\w+)\.md", page)))
    there, found = middle(METHODS[name].load()(), digits(), 0), set[str]()
    for _ in range(3):
        _, downlinks = there.sim.turns(there.rounds + 1, {device: i for i, device in enumerate(there.names)})
        for data in (there.update(there.names[0]), *downlinks.values()):
            content = payload.decode(data)
            found |= {array.partition(".")[0] for array in content.arrays} | {*content.meta} - {"m"}  # m: protocol.md
        there.go_on()
    assert not [what for what in sorted(found) if not re.search(rf"`{what}[`.]", text)]


def test_every_page_is_named_in_the_readme() -> None:
    readme = (PAGES.parents[1] / "README.md").read_text()
    for page in PAGES.glob("*.md"):
        assert f"docs/methods/{page.name}" in readme, page.name


def test_method_list_and_show_have_every_method_and_setting(capsys: pytest.CaptureFixture[str]) -> None:
    method_inspection.methods()
    listed = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", listed, re.MULTILINE) for name in METHODS)
    for name, entry in METHODS.items():
        method_inspection.method(name)
        said = capsys.readouterr().out
        assert all(re.search(rf"^{setting} ", said, re.MULTILINE) for setting in entry.load().model_fields), name
        meanings = method_inspection.descriptions(entry.load())
        assert not [setting for setting in entry.load().model_fields if not meanings.get(setting)], name
    method_inspection.method("fedmask")
    words = " ".join(capsys.readouterr().out.split())
    assert "number above 0 to 1" in words  # keep
    assert "0.2 or 1 number" in words  # its default depends on where the weights are from
    assert "B for weights from a file" in words
    assert "Passes over a device's samples in a round." in words  # said once for all methods
    assert "radius, latent" in words
    assert "A received bit becomes the score" in words  # a docstring of the class
    assert "the last layer is float32" in words  # one of its base
    assert "`maskfleet tune` searches: lr 0.01 to 100, by ratios; keep 0.5, 0.8, 1.0;" in words
    assert "what most often helps when it ends badly: keep = 0.8" in words
    with pytest.raises(ConfigError, match=r"no method 'fedmsk'.*fedmask"):
        method_inspection.method("fedmsk")
