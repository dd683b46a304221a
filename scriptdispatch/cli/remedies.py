"""What `doctor` says of a server that cannot be used: its fault without the driver's affairs, and what to do about it."""

from typing import Final

# From here on a driver talks about itself.
_INTERNALS: Final = (" (configured timeouts", ", Topology Description", ", full error:", " to execute command {")
_START: Final = "start the server, or set {variable} (`make servers` starts one for a trial)"
# What the fault says, and what to do; the first row with a word that is in it. "" where the fault says it itself.
_REMEDIES: Final[tuple[tuple[tuple[str, ...], str], ...]] = (
    (("set it to noeviction",), ""),
    (("'j' option", "journaling"), "start mongod with its journal (without --nojournal): nothing is safe without one"),
    (("too old", "or newer is needed"), "update the server, or set {variable} to another one"),
    (
        ("authentication fail", "refuses the user", "wrongpass", "noauth", "does not accept who we are"),
        "put the right user and password into {variable}",
    ),
    (("not authorized", "requires authentication", "does not allow"), "give the user in {variable} the rights it needs"),
    (("read-only replica",), "set {variable} to the primary"),
    (("store_url:", "queue_url:", "mq_url:"), "mend {variable}"),
    (("refused it",), "mend what it says, or set {variable} to another server"),
    (("out of memory", "quota"), "give the server more room, or find out who fills it"),
    (("still loading", "not ready yet"), "wait until it has started, then ask again"),
)


def short(fault: str) -> str:
    for mark in _INTERNALS:
        fault = fault.partition(mark)[0]
    return fault


def remedy(url: str | None, variable: str, fault: str) -> str:
    """`url` is the part's address; None where it lives in the store's file."""
    if url is None:
        return "it lives in the store's file: see store"
    if url.startswith("sqlite"):
        return "restore the file from a backup, or free the disk"
    said = fault.lower()
    found = next((advice for words, advice in _REMEDIES if any(word in said for word in words)), _START)
    return found.format(variable=variable)
