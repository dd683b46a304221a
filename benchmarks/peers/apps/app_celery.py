from celery import Celery

from apps import work

app = Celery("bench", broker=work.REDIS_URL)
app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)


@app.task
def carry_out(task_id: str, device: str) -> None:
    work.carry_out(task_id, device)


send = carry_out.delay
