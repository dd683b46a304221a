"""The signature of an execution-log message (SPEC 6): HMAC-SHA256, in hex, over its canonical JSON.

Canonical: the message without `signature`, keys sorted at every level, no spaces, UTF-8, non-ASCII characters as they
are. Both sides work on the parsed message, so white space and key order on the way do not matter.
"""

import hashlib
import hmac
import json
from collections.abc import Mapping
from typing import Any


def canonical(message: Mapping[str, Any]) -> bytes:
    unsigned = {name: value for name, value in message.items() if name != "signature"}
    return json.dumps(unsigned, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def sign(message: Mapping[str, Any], secret: str) -> str:
    return hmac.new(secret.encode(), canonical(message), hashlib.sha256).hexdigest()


def verify(message: Mapping[str, Any], secret: str) -> bool:
    """False also for a message without a signature, or with one that is no text."""
    given = message.get("signature")
    if not isinstance(given, str) or not given.isascii():
        return False
    return hmac.compare_digest(given.lower(), sign(message, secret))
