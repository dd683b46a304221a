"""The Python client against the real API."""

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scriptdispatch.client import (
    NO_LINES,
    ApiError,
    AsyncClient,
    Client,
    ClientError,
    Unreachable,
    WaitTimeout,
    chunks,
    task_ref,
)
from tests.unit.cli_server import Api, serving

SCRIPT = {"language": "shell", "content": "echo hi"}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with serving(tmp_path_factory.mktemp("api")) as api:
        yield api


@pytest.fixture
def client(api: Api) -> Iterator[Client]:
    with Client(api.url) as client:
        yield client


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_created_task_is_found_by_its_id_and_by_the_end_of_it(client: Client) -> None:
    task = client.create(name="hello", script=SCRIPT)
    assert client.get(task["id"])["name"] == "hello"
    assert client.get(task["id"][-8:])["id"] == task["id"]


def test_the_same_idempotency_key_creates_one_task(client: Client) -> None:
    first = client.create(name="once", script=SCRIPT, idempotency_key="once-1")
    again = client.create(name="once", script=SCRIPT, idempotency_key="once-1")
    assert first["id"] == again["id"]


def test_a_refusal_carries_the_problem_with_its_field(client: Client) -> None:
    with pytest.raises(ApiError) as caught:
        client.create(name="x", script=SCRIPT, priority="urgent")
    assert (caught.value.status, caught.value.code) == (422, "validation_error")
    assert caught.value.fields[0][0] == "priority"


def test_many_tasks_go_in_several_requests_and_keep_their_index(client: Client) -> None:
    tasks: list[dict[str, Any]] = [{"name": f"n{i}", "script": SCRIPT} for i in range(1003)]
    tasks[1001] = {"name": "bad", "script": SCRIPT, "colour": "red"}
    outcome = client.create_many(tasks)
    assert (outcome["created"], outcome["failed"]) == (1002, 1)
    assert [item["index"] for item in outcome["items"]] == list(range(1003))
    assert "error" in outcome["items"][1001]
    assert outcome["items"][1002]["task"]["name"] == "n1002"


def test_chunks_are_bounded_by_number_and_by_size() -> None:
    assert [len(group) for group in chunks({"n": i} for i in range(2500))] == [1000, 1000, 500]
    big = {"script": "x" * 3_000_000}
    assert [len(group) for group in chunks([big] * 5)] == [2, 2, 1]


def test_wait_answers_when_the_task_is_final(api: Api, client: Client) -> None:
    task = client.create(name="waits", script=SCRIPT)
    with Client(api.url) as other:
        canceler = threading.Timer(0.2, other.cancel, args=(task["id"],), kwargs={"reason": "enough"})
        canceler.start()
        final = client.wait(task["id"], timeout=10)
        canceler.join()
    assert final["status"] == "canceled"


def test_who_only_waits_is_not_sent_the_log(api: Api, client: Client) -> None:
    task = client.create(name="quiet", script=SCRIPT)
    api.says(task["id"], "one", "two")
    names = []
    for event in client.follow(task["id"], after=NO_LINES, timeout=10):
        names.append(event.name)
        if len(names) == 1:
            client.cancel(task["id"])
    assert "state" in names
    assert "log" not in names


def test_wait_gives_up_in_time_and_leaves_the_task_alone(client: Client) -> None:
    task = client.create(name="long", script=SCRIPT)
    began = time.monotonic()
    with pytest.raises(WaitTimeout):
        client.wait(task["id"], timeout=0.3)
    assert time.monotonic() - began < 2
    assert client.get(task["id"])["status"] == "waiting"


def test_followed_logs_have_every_line_once_also_those_from_before(api: Api, client: Client) -> None:
    task = client.create(name="talks", script=SCRIPT)
    api.says(task["id"], "one", "two")
    seen: list[str] = []
    for line in client.logs(task["id"], follow=True, timeout=10):
        seen.append(line["content"])
        if line["content"] == "two":
            api.says(task["id"], "three", first_seq=3)
        if line["content"] == "three":
            api.says(task["id"], "four", first_seq=4)
            client.cancel(task["id"])
    assert seen == ["one", "two", "three", "four"]


def test_pages_of_a_long_log_are_put_together(api: Api, client: Client) -> None:
    task = client.create(name="long log", script=SCRIPT)
    api.says(task["id"], *(f"line {i}" for i in range(900)))
    assert [line["content"] for line in client.logs(task["id"])] == [f"line {i}" for i in range(900)]
    assert [line["content"] for line in client.logs(task["id"], tail=2)] == ["line 898", "line 899"]


def test_a_stream_goes_on_after_the_server_was_away(tmp_path: Path) -> None:
    port = free_port()
    seen: list[tuple[str, Any]] = []
    with serving(tmp_path, port=port) as api, Client(api.url) as client:
        task = client.create(name="survives", script=SCRIPT)
        api.says(task["id"], "before")
        url = api.url
    client = Client(url)
    half_way = threading.Event()

    def follow() -> None:
        for event in client.follow(task["id"], timeout=30):
            seen.append((event.name, event.data.get("content")))
            if event.data.get("content") == "before":
                half_way.set()

    with serving(tmp_path, port=port):
        reader = threading.Thread(target=follow, daemon=True)
        reader.start()
        assert half_way.wait(10)
    with serving(tmp_path, port=port) as api:
        api.says(task["id"], "after", first_seq=2)
        with Client(url) as other:
            other.cancel(task["id"])
        reader.join(20)
        assert not reader.is_alive()
    client.close()
    assert [content for name, content in seen if name == "log"] == ["before", "after"]
    assert "reconnected" in [name for name, _ in seen]


def test_nobody_there_is_unreachable_and_says_where() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with Client(url) as client, pytest.raises(Unreachable, match=url):
        client.get("a" * 8)


def test_an_answer_of_another_kind_of_server_is_unreachable_not_a_crash() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(4)

        def answer() -> None:
            link, _ = server.accept()
            with link:
                link.recv(65_536)
                link.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")

        threading.Thread(target=answer, daemon=True).start()
        with Client(f"http://127.0.0.1:{server.getsockname()[1]}") as client, pytest.raises(Unreachable, match="404"):
            client.get("a" * 8)


def test_a_url_without_scheme_is_refused_at_once() -> None:
    with pytest.raises(ClientError, match="http://"):
        Client("localhost:8080")


def test_an_id_can_not_become_another_path(client: Client) -> None:
    with pytest.raises(ApiError) as caught:
        client.get("../tokens")
    assert caught.value.status == 404
    with pytest.raises(ClientError):
        client.get("..")


@pytest.mark.parametrize(
    "given",
    [
        "0198aaaa-0000-7000-8000-00000000beef",
        "0198AAAA-0000-7000-8000-00000000BEEF",
        "http://console/tasks/0198aaaa-0000-7000-8000-00000000beef?tab=log",
    ],
)
def test_ids_and_links_mean_the_task(given: str) -> None:
    assert task_ref(given) == "0198aaaa-0000-7000-8000-00000000beef"


def test_the_short_form_that_lists_show_is_taken() -> None:
    assert task_ref("…0000beef") == "0000beef"


async def test_the_async_client_has_the_same_words(api: Api) -> None:
    async with AsyncClient(api.url) as client:
        task = await client.create({"name": "async"}, script=SCRIPT)
        waiting = asyncio.create_task(client.wait(task["id"], timeout=10))
        await client.cancel(task["id"], reason="done with it")
        assert (await waiting)["status"] == "canceled"


def test_the_client_works_under_a_running_loop(api: Api) -> None:
    async def inside() -> str:
        with Client(api.url) as client:
            return str(client.create(name="nested", script=SCRIPT)["status"])

    assert asyncio.run(inside()) == "waiting"


def test_leaving_a_followed_log_early_closes_its_stream(api: Api, client: Client) -> None:
    task = client.create(name="left", script=SCRIPT)
    api.says(task["id"], "one", "two")
    lines = client.logs(task["id"], follow=True)
    assert next(lines)["content"] == "one"
    lines.close()  # type: ignore[attr-defined]
    assert client.get(task["id"])["status"] == "waiting"
