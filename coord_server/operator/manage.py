"""`maskfleet federation change | delete | tokens | revoke | viewer ...` and `maskfleet bundle list | delete`.

The entry point `federation` names the application here, so that it has the commands of `cli` and these.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from coord_server.auth import TOKEN_FILE, URL, hashed, token_id
from coord_server.operator.cli import (
    AsJson,
    Id,
    TokenFile,
    Url,
    answer,
    app,
    asked,
    connected,
)
from coord_server.operator.show import DIGITS
from coord_server.operator.tables import plain, table_of
from edge_client.errors import ConfigError, UnreachableError
from edge_client.named_bundles import packaged
from edge_client.protocol.messages import Change
from edge_client.protocol.operator import BundleSummary, TokenSummary, Viewer, ViewerRequest
from edge_client.protocol.patterns import DIGEST, SENTENCES, TOKEN_ID

LEAST = 4  # digits that name a bundle to delete


def _of_a_token(given: str) -> str:
    """The id of a token: of one that is given whole only the id is sent, because servers log addresses."""
    id_ = token_id(hashed(given)) if re.fullmatch(DIGEST, given) else given
    if not re.fullmatch(TOKEN_ID, id_):
        raise typer.BadParameter(f"this is neither a token nor the id of one: {SENTENCES[TOKEN_ID]}")
    return id_


TokenId = Annotated[str, typer.Argument(help="The token's id, from the list, or the token.", callback=_of_a_token)]


@app.command()
def change(
    id_: Id,
    deadline_seconds: Annotated[float | None, typer.Option(help="Of the attempt under way too.")] = None,
    rounds: Annotated[int | None, typer.Option(help="In force from the next round.")] = None,
    cohort: Annotated[int | None, typer.Option(help="From the next attempt; at most that of creation.")] = None,
    min_devices: Annotated[int | None, typer.Option(help="Only while it recruits.")] = None,
    min_updates: Annotated[int | None, typer.Option(help="At once.")] = None,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Change settings of a federation that is not over; what is left out stays."""
    new = asked(Change, deadline_seconds=deadline_seconds, rounds=rounds, cohort=cohort, min_devices=min_devices,
                min_updates=min_updates)  # fmt: skip
    if new == Change():
        raise ConfigError("nothing to change; name a setting, such as --rounds 30")
    with connected(url, token_file) as operator:
        operator.change(id_, new)
    print(f"{id_}: " + ", ".join(f"{name} = {value}" for name, value in new.model_dump(exclude_none=True).items()))


@app.command()
def delete(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE) -> None:
    """Delete a federation with its devices, rounds and state; one that runs has to be stopped first."""
    with connected(url, token_file) as operator:
        operator.delete(id_)
    print(f"{id_}: deleted")


@app.command()
def tokens(id_: Id, url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List a federation's join tokens: id, uses left, when each expires."""
    answer(lambda operator: operator.tokens(id_), _tokens, url, token_file, as_json)


def _tokens(found: Sequence[TokenSummary]) -> list[Table]:
    table = table_of("id", "uses left", "expires")
    for t in found:
        table.add_row(t.id, str(t.uses_left), _at(t.expires_at))
    return [table]


@app.command()
def revoke(id_: Id, token: TokenId, url: Url = URL, token_file: TokenFile = TOKEN_FILE) -> None:
    """Revoke a join token; devices that have joined with it stay."""
    with connected(url, token_file) as operator:
        operator.revoke(id_, token)
    print(
        f"{token}: revoked. Devices that joined with it stay: `maskfleet federation devices {id_} --json` has when "
        f"each joined (enrolled_at), `maskfleet federation remove {id_} DEVICE` removes one"
    )


@app.command()
def viewer(
    expires_in: Annotated[float, typer.Option(help="Seconds it is good for.")] = 30 * 86400.0,
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Print a fresh token that may read everything but secrets, and change nothing."""
    with connected(url, token_file) as operator:
        print(operator.viewer(asked(ViewerRequest, expires_in=expires_in)).token)


@app.command()
def viewers(url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List the viewers' tokens: id, when each expires."""
    answer(lambda operator: operator.viewers(), _viewers, url, token_file, as_json)


def _viewers(found: Sequence[Viewer]) -> list[Table]:
    table = table_of("id", "expires")
    for v in found:
        table.add_row(v.id, _at(v.expires_at))
    return [table]


@app.command()
def revoke_viewer(token: TokenId, url: Url = URL, token_file: TokenFile = TOKEN_FILE) -> None:
    """Revoke a viewer's token."""
    with connected(url, token_file) as operator:
        operator.revoke_viewer(token)
    print(f"{token}: revoked")


def list_bundles(url: Url = URL, token_file: TokenFile = TOKEN_FILE, as_json: AsJson = False) -> None:
    """List a coordinator's bundles: name, parameters, missing parts, federations that use each (--json: all digits)."""
    try:
        answer(lambda operator: operator.bundles(), _bundles, url, token_file, as_json)
    except ConfigError as error:
        raise ConfigError(f"{error}{_packaged()}") from None
    except UnreachableError as error:
        raise UnreachableError(f"{error}{_packaged()}") from None


def _packaged() -> str:
    """Which bundles need no coordinator, as the end of a sentence; "" when none is installed."""
    found = ", ".join(packaged())
    return f"; without a coordinator there are {found}: `maskfleet bundle inspect NAME` shows one" if found else ""


def _bundles(found: Sequence[BundleSummary]) -> list[Table | Text]:
    table = table_of("digest", "name", "parameters", "missing", "used by")
    for b in found:
        table.add_row(b.digest[:DIGITS], b.name, f"{b.parameters:,}", ", ".join(b.missing), ", ".join(b.federations))
    return [table, *(plain(f"fault of {b.digest[:DIGITS]}: {b.fault}") for b in found if b.fault)]


def delete_bundle(
    digest: Annotated[str, typer.Argument(help="The bundle's digest, or its beginning.")],
    url: Url = URL,
    token_file: TokenFile = TOKEN_FILE,
) -> None:
    """Delete a bundle that no federation uses."""
    if len(digest) < LEAST:  # an empty variable of a script would name the only bundle there is
        raise ConfigError(
            f"{digest!r} is no digest; give {LEAST} digits or more, as `maskfleet bundle list` shows them"
        )
    with connected(url, token_file) as operator:
        found = [b.digest for b in operator.bundles() if b.digest.startswith(digest)]
        if len(found) != 1:
            raise ConfigError(f"{len(found)} bundles begin with {digest!r}; `maskfleet bundle list` shows them")
        operator.delete_bundle(found[0])
    print(f"{found[0]}: deleted")


def _at(seconds: float) -> str:
    """A time in this machine's time zone."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
