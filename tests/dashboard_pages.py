"""The dashboard's pages as a browser without a script reads and sends them."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

import httpx
from coordination import OPERATOR, Fleet

HTML = {"Accept": "text/html,*/*;q=0.8"}
FORM = {**HTML, "Origin": "http://coordinator"}
PAGE = "/federations/fed"


class Reader(HTMLParser):
    """What a page refers to, and what the Content-Security-Policy would refuse in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.inline: list[str] = []
        self.forms: list[str] = []
        self.unlabelled: list[str] = []
        self.headings: list[int] = []
        self._labelled = set(re.findall(r'<label for="([^"]+)"', text))
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.addresses += [v or "" for k, v in attrs if k in ("href", "src", "action", "srcset", "poster", "data")]
        self.inline += [f"{tag} {k}" for k in given if k.startswith("on") or k == "style"]
        self.inline += ["style"] if tag == "style" else []
        self._script = tag == "script"
        if tag == "form" and given.get("method") == "post":
            self.forms.append(given["action"] or "")
        if (
            tag in ("input", "select")
            and given.get("type") != "hidden"
            and "hidden" not in given
            and given.get("id") not in self._labelled
        ):
            self.unlabelled.append(str(given))
        if re.fullmatch("h[1-6]", tag):
            self.headings.append(int(tag[1]))

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(f"script {data}")
        self._script = False


async def log_in(fleet: Fleet, token: str = OPERATOR) -> httpx.Response:
    return await fleet.http.post("/login", data={"token": token, "next": PAGE}, headers=FORM)


async def form_of(fleet: Fleet) -> str:
    """The token that the forms of this session carry."""
    found = re.search(r'name="form" value="([0-9a-f]+)"', (await fleet.http.get(PAGE)).text)
    assert found is not None
    return found.group(1)


async def send(fleet: Fleet, action: str, headers: dict[str, str] = FORM, **fields: str) -> httpx.Response:
    if "form" not in fields:
        fields["form"] = await form_of(fleet)
    return await fleet.http.post(f"{PAGE}/{action}", data=fields, headers=headers)


def said(answer: httpx.Response) -> str:
    """The text of a page."""
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", answer.text)).split())
