"""The Lua scripts as texts: each says what it takes and answers, and uses nothing that Redis 6.2 does not have."""

import re
from pathlib import Path

import pytest

import scriptdispatch.queue
from scriptdispatch.queue.redis_partition import partition

SCRIPTS = sorted((Path(scriptdispatch.queue.__file__).parent / "lua").glob("*.lua"))
# All of them are older than 6.2.
COMMANDS = {
    "DEL", "EXISTS", "HDEL", "HGET", "HGETALL", "HINCRBY", "HKEYS", "HLEN", "HMGET", "HSET", "PUBLISH", "SADD", "SMEMBERS",
    "SRANDMEMBER", "SREM", "TIME", "ZADD", "ZCARD", "ZRANGE", "ZRANGEBYLEX", "ZRANGEBYSCORE", "ZRANK", "ZREM",
}  # fmt: skip


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_uses_only_commands_of_redis_6_2(path: Path) -> None:
    assert set(re.findall(r"call\('(\w+)'", path.read_text())) <= COMMANDS


@pytest.mark.parametrize("path", [path for path in SCRIPTS if path.stem != "lanes"], ids=lambda path: path.stem)
def test_its_header_says_what_it_takes_and_answers(path: Path) -> None:
    header = path.read_text().split("\nlocal ")[0]
    assert "-- args " in header
    assert "-- answers " in header


def test_every_key_carries_its_partition_in_braces() -> None:
    for path in SCRIPTS:
        for line in path.read_text().splitlines():
            assert not re.search(r"call\('\w+', '", line), f"{path.name}: {line}"
    assert partition("scriptdispatch:", "dev-1") == "scriptdispatch:{p0}:"
