"""The bell: rings reach whoever listens, in this process or another, and never block whoever rings."""

import asyncio
import os
import resource
import socket
from pathlib import Path

from scriptdispatch.bell import MAX_PAYLOAD, Bell


async def heard(payloads: list[bytes], count: int) -> list[bytes]:
    async with asyncio.timeout(5):
        while len(payloads) < count:
            await asyncio.sleep(0.001)
    return payloads


async def test_every_listener_of_the_topic_hears_the_ring(tmp_path: Path) -> None:
    one, two = Bell(tmp_path / "db"), Bell(tmp_path / "db")
    first: list[bytes] = []
    second: list[bytes] = []
    other: list[bytes] = []
    stops = [one.listen("queue", first.append), two.listen("queue", second.append), two.listen("stream", other.append)]
    one.ring("queue", b"hello")
    assert await heard(first, 1) == [b"hello"]
    assert await heard(second, 1) == [b"hello"]
    assert other == []
    for stop in stops:
        stop()


async def test_a_topic_whose_name_begins_like_another_is_not_confused_with_it(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "db")
    calls: list[bytes] = []
    stop = bell.listen("queue", calls.append)
    bell.ring("que")
    bell.ring("queue", b"right")
    assert await heard(calls, 1) == [b"right"]
    stop()


async def test_ringing_without_listeners_or_folder_is_no_error(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "missing" / "db")
    bell.ring("queue")
    assert not bell.has_listeners("queue")


async def test_listeners_are_known_until_they_stop(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "db")
    stop = bell.listen("queue", lambda _: None)
    assert bell.has_listeners("queue")
    assert not bell.has_listeners("stream")
    stop()
    assert not bell.has_listeners("queue")


async def test_a_listener_that_comes_or_goes_long_after_the_last_look_is_noticed(tmp_path: Path) -> None:
    bell, other = Bell(tmp_path / "db"), Bell(tmp_path / "db")
    stop_first = other.listen("stream", lambda _: None)
    for _ in range(2):
        os.utime(tmp_path / "db-bells", (0, 0))  # settled long ago: what is listed now is kept
        assert not bell.has_listeners("queue")
        calls: list[bytes] = []
        stop = other.listen("queue", calls.append)
        bell.ring("queue", b"new")
        assert await heard(calls, 1) == [b"new"]
        os.utime(tmp_path / "db-bells", (1, 1))
        assert bell.has_listeners("queue")
        stop()
        assert not bell.has_listeners("queue")
    stop_first()


async def test_the_socket_of_a_dead_process_is_removed_by_the_next_ring(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "db")
    folder = tmp_path / "db-bells"
    folder.mkdir()
    left = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    left.bind(str(folder / "queue.1.dead"))
    left.close()  # the name stays, as after kill -9
    calls: list[bytes] = []
    stop = bell.listen("queue", calls.append)
    bell.ring("queue", b"x")
    assert await heard(calls, 1) == [b"x"]
    assert not (folder / "queue.1.dead").exists()
    stop()


async def test_a_listener_that_does_not_listen_never_blocks_the_ringer(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "db")
    calls: list[bytes] = []
    stop = bell.listen("queue", calls.append)
    for _ in range(5000):  # the loop does not run meanwhile, so nothing is heard
        bell.ring("queue")
    assert calls == []
    await heard(calls, 1)
    stop()


async def test_a_full_payload_arrives(tmp_path: Path) -> None:
    bell = Bell(tmp_path / "db")
    calls: list[bytes] = []
    stop = bell.listen("events", calls.append)
    bell.ring("events", b"x" * MAX_PAYLOAD)
    assert await heard(calls, 1) == [b"x" * MAX_PAYLOAD]
    stop()


async def test_a_folder_with_a_very_long_path_works_too(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    bell, ringer = Bell(deep / "db"), Bell(deep / "db")
    calls: list[bytes] = []
    stop = bell.listen("queue", calls.append)
    ringer.ring("queue", b"far")
    assert await heard(calls, 1) == [b"far"]
    stop()
    bell.close()
    ringer.close()


async def test_a_process_without_a_handle_left_rings_nobody_and_goes_on(tmp_path: Path) -> None:
    heard_all: list[bytes] = []
    stop = Bell(tmp_path / "db").listen("queue", heard_all.append)
    bell = Bell(tmp_path / "db")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        assert not bell.has_listeners("queue")
        bell.ring("queue", b"lost")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert bell.ring("queue", b"back")
    assert await heard(heard_all, 1) == [b"back"]
    stop()
