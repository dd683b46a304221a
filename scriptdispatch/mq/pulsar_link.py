"""The blocking half of the Pulsar stream: one client of the library, its consumer and its producers.

Everything here blocks, for a bounded time, and is called from threads (`pulsar.py` has the loop). Connections are made when
they are first needed, in the process that needs them: the library does not survive a fork. It reconnects by itself; what it
closes for good is made anew by the next call. Its exceptions become ours here, by the table AWAY.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final
from urllib.parse import urlsplit

import pulsar
from msgspec import Struct

from scriptdispatch import logs
from scriptdispatch.errors import SettingsError, StreamUnavailable
from scriptdispatch.mq.pulsar_hand import Received
from scriptdispatch.mq.pulsar_log import library_logger

SUBSCRIPTION: Final = "scriptdispatch"
OPERATION_S: Final = 5  # to look up a topic, to make a producer or consumer
CONNECT_MS: Final = 3_000
SEND_S: Final = 8.0  # until a message is durable, or its sender hears that it is not
CALLBACKS_S: Final = 5.0  # beyond that, for the library to say so
BATCHING_MS: Final = 2  # only for what `flush` does not send at once
PREFETCH: Final = 2_000  # messages on their way to a consumer beside those in its hand
PENDING: Final = 20_000
log = logs.get("pulsar")

AWAY: Final[dict[type[Exception], str]] = {
    pulsar.Timeout: "does not answer in time",
    pulsar.ConnectError: "cannot be reached",
    pulsar.NotConnected: "is not connected",
    pulsar.ServiceUnitNotReady: "is not ready yet",
    pulsar.AlreadyClosed: "was closed",
    pulsar.TopicNotFound: "does not know the topic, or its tenant or namespace",
    pulsar.InvalidTopicName: "does not accept the name of the topic",
    pulsar.AuthenticationError: "does not accept who we are",
    pulsar.AuthorizationError: "does not allow us to use the topic",
    pulsar.ConsumerBusy: "has an exclusive consumer on our subscription",
    pulsar.ProducerBlockedQuotaExceededError: "takes no more: the backlog quota of the topic is full",
    pulsar.ProducerBlockedQuotaExceededException: "takes no more: the backlog quota of the topic is full",
    pulsar.TopicTerminated: "says that the topic was terminated",
    pulsar.PulsarException: "failed",
}


class Sending:
    """Messages of one caller on their way. The library calls `note` once for each, from its thread or from ours."""

    def __init__(self, messages: Sequence[tuple[str | None, bytes]]) -> None:
        self.messages = messages
        self.done = threading.Event()
        self._results: list[Any] = []

    def note(self, result: Any, _: Any) -> None:
        self._results.append(result)  # atomic, unlike a counter: whoever comes last sees them all
        if len(self._results) == len(self.messages):
            self.done.set()

    @property
    def failed(self) -> Any:
        """The library's word for it; None: all are durable."""
        return next((result for result in self._results if result != pulsar.Result.Ok), None)


class Outcome(Struct):
    """Why a `Sending` is not durable; None: it is. `too_large`: no use in trying again."""

    error: str | None
    too_large: bool = False


class Batch(Struct):
    messages: list[Received]
    consumer: int  # the number of the consumer that they came by


class PulsarLink:
    def __init__(self, url: str, topic: str) -> None:
        self._url, self._topic = url, topic
        self._lock = threading.Lock()  # while a part is made, so that it is made once
        self._closed = False
        self._client: Any = None
        self._consumer: Any = None
        self._consumers = 0  # made so far
        self._producers: dict[str, Any] = {}
        self.name = f"Pulsar at {urlsplit(url).netloc.rpartition('@')[2] or 'an unreadable address'}"

    # --- receiving

    def receive(self, limit: int, wait_s: float) -> Batch:
        """The first within `wait_s`, then what is there: the library's own batches would wait out their time."""
        consumer, number = self._made_consumer()
        messages: list[Received] = []
        try:
            messages.append(consumer.receive(max(0, round(wait_s * 1000))))
            while len(messages) < limit:
                messages.append(consumer.receive(0))
        except pulsar.Timeout:
            if not messages and not consumer.is_connected():
                raise StreamUnavailable(f"{self.name} is not connected") from None
        except pulsar.PulsarException as error:
            self._drop_consumer(consumer)
            raise self._away(error) from error
        return Batch(messages, number)

    def acknowledge(self, number: int, messages: Sequence[Received]) -> None:
        """The library sends acknowledgements a moment later. One that is lost brings its message again."""
        with self._lock:
            consumer = self._consumer if number == self._consumers else None
        if consumer is None:
            raise StreamUnavailable(f"{self.name}: the consumer was closed; its messages come again")
        try:
            for message in messages:
                consumer.acknowledge(message)
        except pulsar.PulsarException as error:
            raise self._away(error) from error

    # --- publishing

    def send(self, topic: str, sendings: Sequence[Sending]) -> list[Outcome]:
        """All at once; when it returns, the fate of each is known. Bounded by SEND_S."""
        producer = self._made_producer(topic)
        try:
            for sending in sendings:
                for key, body in sending.messages:
                    producer.send_async(body, sending.note, partition_key=key)
            producer.flush()  # sends without waiting for BATCHING_MS
        except pulsar.PulsarException as error:
            log.debug("a flush failed; the callbacks say what of it", error=str(error))
        deadline = time.monotonic() + CALLBACKS_S
        return [self._outcome(topic, sending, deadline) for sending in sendings]

    def _outcome(self, topic: str, sending: Sending, deadline: float) -> Outcome:
        if not sending.done.wait(max(0.0, deadline - time.monotonic())):
            self._drop_producer(topic)
            return Outcome(f"{self.name} does not say whether messages were stored")
        if sending.failed is None:
            return Outcome(None)
        if sending.failed == pulsar.Result.MessageTooBig:
            return Outcome("a message is larger than the broker takes", too_large=True)
        if sending.failed != pulsar.Result.Timeout:  # whatever else it is, a new producer is not worse off
            self._drop_producer(topic)
        return Outcome(f"{self.name} did not store messages: {sending.failed.name}")

    # --- life

    def ask(self) -> None:
        """One question to the broker and back."""
        try:
            self._made_client().get_topic_partitions(self._topic)
        except pulsar.PulsarException as error:
            raise self._away(error) from error

    def open(self) -> None:
        """Allows connections; makes none."""
        with self._lock:
            self._closed = False

    def close(self) -> None:
        """Ends a `receive` that waits in another thread, and lets a late one make no new connection."""
        with self._lock:
            self._closed = True
            client, self._client, self._consumer = self._client, None, None
            self._producers.clear()
        if client is not None:
            try:
                client.close()
            except pulsar.PulsarException as error:  # it is gone either way, and the broker notices
                log.debug("closed without a word to the broker", error=str(error))

    def _made_client(self) -> Any:
        with self._lock:
            return self._client_locked()

    def _client_locked(self) -> Any:
        if self._closed:
            raise StreamUnavailable(f"{self.name}: the stream is closed")
        if self._client is None:
            try:
                self._client = pulsar.Client(
                    self._url,
                    logger=library_logger(),
                    operation_timeout_seconds=OPERATION_S,
                    connection_timeout_ms=CONNECT_MS,
                    stats_interval_in_seconds=0,
                )
            except ValueError as error:
                raise SettingsError(f"mq_url: {error}; it should look like pulsar://host:6650") from None
        return self._client

    def _made_consumer(self) -> tuple[Any, int]:
        with self._lock:
            if self._consumer is None:
                self._consumer = self._made(lambda client: self._subscribe(client, self._topic, PREFETCH))
                self._consumers += 1
            return self._consumer, self._consumers

    def _made_producer(self, topic: str) -> Any:
        with self._lock:
            if topic not in self._producers:
                self._producers[topic] = self._made(lambda client: self._new_producer(client, topic))
            return self._producers[topic]

    def _made(self, make: Callable[[Any], Any]) -> Any:
        try:
            return make(self._client_locked())
        except pulsar.PulsarException as error:
            raise self._away(error) from error

    def _subscribe(self, client: Any, topic: str, prefetch: int) -> Any:
        return client.subscribe(
            topic,
            SUBSCRIPTION,
            consumer_type=pulsar.ConsumerType.Shared,
            initial_position=pulsar.InitialPosition.Earliest,
            receiver_queue_size=prefetch,
        )

    def _new_producer(self, client: Any, topic: str) -> Any:
        # First the subscription, if there is none yet: without one the broker keeps nothing for those who come later, and
        # removes an idle topic with all that is in it.
        self._subscribe(client, topic, 1).close()
        return client.create_producer(
            topic,
            send_timeout_millis=round(SEND_S * 1000),
            max_pending_messages=PENDING,
            block_if_queue_full=True,
            batching_enabled=True,
            batching_max_publish_delay_ms=BATCHING_MS,
        )

    def _drop_consumer(self, consumer: Any) -> None:
        with self._lock:
            if self._consumer is consumer:
                self._consumer = None
        _close(consumer)

    def _drop_producer(self, topic: str) -> None:
        with self._lock:
            producer = self._producers.pop(topic, None)
        if producer is not None:
            _close(producer)

    def _away(self, error: Exception) -> StreamUnavailable:
        words = next(words for kind, words in AWAY.items() if isinstance(error, kind))
        return StreamUnavailable(f"{self.name} {words} ({error})")


def _close(part: Any) -> None:
    try:
        part.close()
    except pulsar.PulsarException as error:
        log.debug("was closed already", error=str(error))
