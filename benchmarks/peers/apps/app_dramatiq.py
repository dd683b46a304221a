import dramatiq
from dramatiq.brokers.redis import RedisBroker

from apps import work

dramatiq.set_broker(RedisBroker(url=work.REDIS_URL))


@dramatiq.actor
def carry_out(task_id: str, device: str) -> None:
    work.carry_out(task_id, device)


send = carry_out.send
