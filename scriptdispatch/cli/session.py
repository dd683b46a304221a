"""What every command shares: the options `--json --color --utc` and, for clients of the API, `--url --token`."""

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from scriptdispatch.cli.screen import ColorChoice, Screen

if TYPE_CHECKING:
    from scriptdispatch.client import Client

F = TypeVar("F", bound=Callable[..., Any])
_OUTPUT = "Output"
_SERVER = "Server"
JsonOption = Annotated[bool, typer.Option("--json", help="The API's JSON instead of text.", rich_help_panel=_OUTPUT)]
ColorOption = Annotated[ColorChoice, typer.Option("--color", help="Colours: auto, always, never.", rich_help_panel=_OUTPUT)]
UtcOption = Annotated[bool, typer.Option("--utc", help="Times in UTC instead of local time.", rich_help_panel=_OUTPUT)]
UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The server [SCRIPTDISPATCH_URL; http://127.0.0.1:8080].", rich_help_panel=_SERVER),
]
TokenOption = Annotated[
    str | None, typer.Option("--token", help="The token [SCRIPTDISPATCH_TOKEN].", rich_help_panel=_SERVER)
]
_SCREEN_OPTIONS = {"json": (JsonOption, False), "color": (ColorOption, "auto"), "utc": (UtcOption, False)}
_SERVER_OPTIONS = {"url": (UrlOption, None), "token": (TokenOption, None)}


@dataclass(slots=True)
class Session:
    """One run of one command."""

    screen: Screen
    url: str | None = None
    token: str | None = None
    _client: "Client | None" = field(default=None, repr=False)

    @property
    def client(self) -> "Client":
        if self._client is None:
            check_url(self.url)
            from scriptdispatch.client import Client  # takes longer than all the rest: only for those who talk

            self._client = Client(self.url, self.token)
        return self._client

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def task_id(self, given: str) -> str:
        """The whole id for what people give: an id, its last 8 characters, a link."""
        from scriptdispatch.client import task_ref
        from scriptdispatch.ids import is_id

        ref = task_ref(given)
        return ref if is_id(ref) else str(self.client.get(ref)["id"])


def command(app: typer.Typer, name: str, *, server: bool = True, hidden: bool = False) -> Callable[[F], F]:
    """Registers a function whose first argument is the Session; the shared options are added to its own."""

    def register(function: F) -> F:
        app.command(name, hidden=hidden)(_with_shared_options(function, server))
        return function

    return register


def _with_shared_options(function: Callable[..., Any], server: bool) -> Callable[..., Any]:
    shared = {**_SCREEN_OPTIONS, **(_SERVER_OPTIONS if server else {})}

    def run(**given: Any) -> Any:
        own = {key: given[key] for key in given if key not in shared}
        screen = Screen(json=given["json"], color=given["color"], utc=given["utc"])
        session = Session(screen, given.get("url"), given.get("token"))
        try:
            return function(session, **own)
        finally:
            session.close()

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [one.replace(kind=keyword) for one in list(inspect.signature(function).parameters.values())[1:]]
    added = [inspect.Parameter(key, keyword, default=default, annotation=kind) for key, (kind, default) in shared.items()]
    run.__doc__ = function.__doc__
    run.__name__ = function.__name__
    run.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in (*own, *added)}
    return run


def check_url(given: str | None) -> None:
    """The server's address, blamed on where it came from: the flag or the variable."""
    url = given or os.environ.get("SCRIPTDISPATCH_URL")
    if url and not url.startswith(("http://", "https://")):
        raise wrong("--url" if given else "SCRIPTDISPATCH_URL", f"must start with http:// or https://, not {url!r}")


def wrong(option: str, message: str) -> typer.BadParameter:
    """Wrong usage: names the option and says what to do (exit 2)."""
    return typer.BadParameter(f"{option}: {message}")
