from functools import cache

from taskiq_redis import ListQueueBroker

from apps import work

broker = ListQueueBroker(url=work.REDIS_URL)
start = broker.startup
asynchronous = cache(work.Asynchronous)


@broker.task
async def carry_out(task_id: str, device: str) -> None:
    await asynchronous().carry_out(task_id, device)


send = carry_out.kiq
