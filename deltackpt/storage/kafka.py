# SPDX-License-Identifier: Apache-2.0
"""A topic of Kafka, through confluent-kafka: the extra ``deltackpt[kafka]``.

A message may be stored twice, or late after a failure; ``format.wal_format`` handles that. The
user's configuration may have secrets, so it is in no error, log or ``repr``.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from deltackpt import events
from deltackpt.errors import DeltackptError, MissingExtra, OptionError, StorageError

#: The user's configuration of librdkafka, or what returns it.
Config = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

#: Limit of each request that is not a produced message.
REQUEST_SECS = 60.0
#: Memory for messages that were not acknowledged, and for those read ahead, in KiB.
_QUEUE_KBYTES = 64 << 10
#: Bytes of one fetch of a partition: shorter ones limit the throughput.
_FETCH_BYTES = 8 << 20
#: What a batch adds to its messages, at most.
_BATCH_BYTES = 512
#: librdkafka logs twenty lines a second while a broker is away.
_LOG_SECS = 1.0
_POLL_SECS = 0.1
#: Within this time, every broker knows a topic that was just created.
_NEW_TOPIC_SECS = 3.0
#: Messages that a reader takes at once.
_READ_MESSAGES = 64
_GROUP = "deltackpt"
_logger = logging.getLogger(__name__)
#: Names of topics that Kafka accepts.
TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")

#: Settings that the guarantees of a WAL depend on, or that deltackpt sets itself.
_RESERVED = frozenset(
    {
        *("acks", "request.required.acks", "enable.idempotence", "transactional.id"),
        *("partitioner", "sticky.partitioning.linger.ms", "enable.gapless.guarantee"),
        *("message.send.max.retries", "retries", "delivery.timeout.ms", "message.timeout.ms"),
        *("message.max.bytes", "queuing.strategy", "queue.buffering.max.kbytes"),
        *("delivery.report.only.error", "dr_cb", "dr_msg_cb", "on_delivery", "event_cb"),
        *("error_cb", "log_cb", "logger", "log.queue", "default.topic.config"),
        *("group.id", "group.protocol", "enable.auto.commit", "auto.commit.enable"),
        *("enable.auto.offset.store", "auto.offset.reset", "isolation.level", "check.crcs"),
        *("enable.partition.eof", "allow.auto.create.topics"),
    }
)
_IN_FLIGHT = ("max.in.flight", "max.in.flight.requests.per.connection")
_SECRET = ("password", "secret", "token", "jaas", "key.pem", "oauthbearer.config")


def check_config(config: Mapping[str, object]) -> None:
    """Raises ``OptionError`` if a configuration sets something that deltackpt must set."""
    if not isinstance(config, Mapping) or not all(isinstance(key, str) for key in config):
        raise OptionError(
            "KafkaWal.config: expected a mapping of librdkafka's settings, found "
            f"{type(config).__name__}"
        )
    if reserved := sorted(_RESERVED.intersection(config)):
        raise OptionError(
            f"KafkaWal.config: expected no {', '.join(reserved)}, which deltackpt sets so that an "
            "acknowledged record is never lost, found a value; remove it"
        )
    for name in _IN_FLIGHT:
        if name in config and str(config[name]) not in {"1", "2", "3", "4", "5"}:
            raise OptionError(
                f"KafkaWal.config: expected {name} of 1 to 5, so that messages stay in order, "
                "found another value"
            )


def read_settings(path: Path) -> dict[str, str]:
    """Returns the settings of librdkafka in a file of lines ``name=value``.

    Raises ``OptionError`` if it is not such a file; the error contains nothing from it.
    """
    found = {}
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"{path}: expected a file of librdkafka's settings, found "
            f"{getattr(error, 'strerror', 'no text')}; pass another file"
        ) from None
    for number, line in enumerate(lines, 1):
        name, equals, value = (one.strip() for one in line.partition("="))
        if not name or name.startswith("#"):
            continue
        if not equals:
            raise OptionError(
                f"{path}: expected a setting such as name=value in line {number}, found none; see "
                "docs/how-to/kafka.md"
            )
        found[name] = value
    check_config(found)
    return found


class Offsets(NamedTuple):
    """The messages that a partition holds: the first, and the one after the last."""

    start: int
    stop: int


class Message(NamedTuple):
    """A message as stored."""

    partition: int
    offset: int
    data: bytes


class Topic:
    """A topic that exists; connects when it is used. Thread-safe."""

    def __init__(self, name: str, config: Config):
        """Sends no request yet; a ``config`` function is called whenever a client starts."""
        self.name = name
        self.config = config
        self._kafka = _library()
        self._lock = threading.Lock()
        #: One client for offsets and one for messages: a broker answers the requests of a
        #: connection in turn, and delays a fetch until there is a message.
        self._readers: dict[Literal["look up", "fetch"], _KafkaClient] = {}

    def __str__(self) -> str:
        return f"Kafka topic {self.name!r}"

    def check(self, *, partitions: int, message_bytes: int, timeout_secs: float) -> None:
        """Raises ``OptionError`` if the topic is missing, too small or would lose records."""
        client = self._admin()
        found = client.metadata(timeout_secs).topics[self.name].partitions
        if len(found) < partitions:
            raise self._unfit(f"a partition for each of {partitions} processes", f"{len(found)}")
        options = client.topic_options()
        copies = min(len(one.replicas) for one in found.values())
        if copies < 2:
            events.warn(f"{self}: it has one replica: if that broker is lost, its records are lost")
        needed = min(2, copies)
        insync = int(options.get("min.insync.replicas", needed))
        if insync < needed:
            raise self._unfit(
                f"min.insync.replicas of at least {needed} with {copies} replicas, so that no "
                "acknowledged record is on one broker only",
                f"{insync}",
            )
        if options.get("unclean.leader.election.enable", "false") != "false":
            raise self._unfit("unclean.leader.election.enable=false", "true")
        if options.get("cleanup.policy", "delete") != "delete":
            raise self._unfit("cleanup.policy=delete", options["cleanup.policy"])
        for name in ("retention.ms", "retention.bytes"):
            if options.get(name, "-1") != "-1":
                raise self._unfit(
                    f"{name}=-1, since deltackpt deletes records that no restore needs",
                    options[name],
                )
        longest = int(options.get("max.message.bytes", message_bytes + _BATCH_BYTES))
        if longest < message_bytes + _BATCH_BYTES:
            raise self._unfit(
                f"max.message.bytes of at least {message_bytes + _BATCH_BYTES} for "
                f"KafkaWal.chunk_bytes={message_bytes}",
                f"{longest}",
            )

    def cluster(self) -> str:
        """Returns the id of the cluster."""
        return self._reader().metadata().cluster_id or ""

    def offsets(self, partitions: Collection[int] | None = None) -> dict[int, Offsets]:
        """Returns what each partition holds; everything acknowledged by now is included."""
        with self._lock:
            client = self._reader()
            found = client.metadata().topics[self.name].partitions
            wanted = sorted(found if partitions is None else partitions)
            return {one: client.offsets(one) for one in wanted}

    def read(self, spans: Mapping[int, Offsets], *, follow: bool = False) -> Iterator[Message]:
        """Yields the messages of partitions, each in order; some may have been deleted.

        With ``follow``, later messages are fetched ahead and may be yielded too, so a call that
        continues from there is fast.
        """
        with self._lock:
            yield from self._reader("fetch").messages(spans, follow=follow)

    def truncate(self, offsets: Mapping[int, int]) -> None:
        """Deletes the messages below an offset of each partition."""
        self._admin().delete_records(offsets)

    def producer(
        self, partition: int, *, message_bytes: int, timeout_secs: float, start: int = 0
    ) -> Producer:
        """Returns a new producer; a message waits ``timeout_secs`` for its acknowledgement.

        ``start`` is an offset that the partition has reached: a message before it is an error.
        """
        millis = min(max(int(timeout_secs * 1000), 1000), (1 << 31) - 1)
        settings = {
            "acks": "all",
            "enable.idempotence": True,
            "delivery.timeout.ms": millis,
            "message.max.bytes": message_bytes + _BATCH_BYTES,
            "queue.buffering.max.kbytes": _QUEUE_KBYTES,
            "linger.ms": 0,
        }
        client = _KafkaClient(self, self._kafka.Producer, settings)
        return Producer(str(self), client, partition, start)

    def close(self) -> None:
        """Closes the connections for reading."""
        with self._lock:
            readers, self._readers = self._readers, {}
        for reader in readers.values():
            reader.client.close()

    def _unfit(self, expected: str, found: str) -> OptionError:
        return OptionError(
            f"{self}: expected {expected}, found {found}; change the topic, or use another"
        )

    def _admin(self) -> _KafkaClient:
        return _KafkaClient(self, self._kafka.admin.AdminClient, {})

    def _reader(self, use: Literal["look up", "fetch"] = "look up") -> _KafkaClient:
        if use not in self._readers:
            settings = {
                "group.id": _GROUP,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "enable.partition.eof": True,
                "auto.offset.reset": "error",
                # Nothing is transactional: a transaction that hangs must not hide records.
                "isolation.level": "read_uncommitted",
                "max.partition.fetch.bytes": _FETCH_BYTES,
                "queued.max.messages.kbytes": _QUEUE_KBYTES,
            }
            self._readers[use] = _KafkaClient(self, self._kafka.Consumer, settings)
        return self._readers[use]

    def given(self) -> dict[str, Any]:
        """Returns the user's settings now."""
        config = self.config
        if callable(config):
            try:
                config = config()
            except Exception as error:  # Its text may have secrets.
                raise StorageError(
                    f"{self}: expected KafkaWal.config() to return the settings, found "
                    f"{type(error).__name__}; check what it calls"
                ) from None
        check_config(config)
        return dict(config)


class Producer:
    """Writes messages to one partition; used by one thread.

    After an error, close it: messages that it could not confirm may still appear.
    """

    def __init__(self, name: str, client: _KafkaClient, partition: int, start: int):
        self._name, self._client, self._partition = name, client, partition
        self._reached = start
        self._pending = 0
        self._failed = ""
        #: Offset after the newest acknowledged message; None before the first.
        self.stop: int | None = None
        #: Whether a message got an offset below ``start``, or below that of an earlier message.
        self.is_recreated = False

    def send(self, data: bytes) -> None:
        """Queues a message, after waiting for room; raises if an earlier message has failed."""
        client = self._client
        while True:
            self._check()
            try:
                with client.errors("write"):
                    client.client.produce(
                        client.topic, data, partition=self._partition, on_delivery=self._delivered
                    )
                break
            except BufferError:
                client.client.poll(_POLL_SECS)
        self._pending += 1
        client.client.poll(0)

    def flush(self) -> None:
        """Waits until all in-sync replicas have acknowledged all messages."""
        while self._pending and not self._failed:
            self._client.client.flush(_POLL_SECS)
        self._check()

    def close(self) -> None:
        """Gives up what was not acknowledged; it may still appear. Does not wait."""
        with contextlib.suppress(Exception):
            self._client.client.purge(blocking=False)
            self._client.client.poll(0)

    def _check(self) -> None:
        if self._failed:
            raise StorageError(
                f"{self._name}, partition {self._partition}: expected every in-sync replica to "
                f"store a message, found: {self._failed}"
                f"{self._client.reported_errors()}; check the brokers"
            )

    def _delivered(self, error: Any, message: Any) -> None:
        self._pending -= 1
        if error is not None:
            self._failed = self._failed or self._client.redacted(error.str())
        elif (offset := message.offset()) is not None:
            if offset < self._reached:
                self.is_recreated = True
                self._failed = self._failed or (
                    f"offset {offset} after {self._reached - 1}, so the topic was recreated"
                )
            self._reached = self.stop = max(offset + 1, self._reached)


class _KafkaClient:
    """A client of librdkafka, with its errors and logs."""

    def __init__(self, of: Topic, kind: Any, settings: Mapping[str, Any]):
        self._kafka, self._name = _library(), str(of)
        self.topic = of.name
        given = of.given()
        self._secrets = {
            value
            for key, value in given.items()
            if isinstance(value, str) and value and any(one in key for one in _SECRET)
        }
        #: Errors that the library reported, but no call has raised.
        self.failures: set[str] = set()
        self._denied = ""
        #: Offset of the next message of each assigned partition.
        self._positions: dict[int, int] = {}
        settings = {**given, **settings, "error_cb": self._failed}
        with self.errors("start a client"):
            try:
                self.client = kind(settings, logger=_QuietLog(self.redacted))
            except (TypeError, ValueError) as error:
                raise OptionError(
                    f"KafkaWal.config: expected settings of librdkafka, found one that it refuses "
                    f"({type(error).__name__})"
                ) from None

    def metadata(self, timeout_secs: float = REQUEST_SECS) -> Any:
        """Returns the metadata of the cluster and the topic; raises if the topic is not usable."""
        started, kafka = time.monotonic(), self._kafka
        deadline = started + timeout_secs
        while True:
            error = None
            try:
                found = self.client.list_topics(self.topic, timeout=1.0)
                one = found.topics[self.topic]
                error = one.error
                if error is None and one.partitions:
                    return found
            except kafka.KafkaException as raised:
                error = raised.args[0]
            self.client.poll(0)
            code = None if error is None else error.code()
            codes = kafka.KafkaError
            if self._denied:
                raise StorageError(
                    f"{self._name}: expected the brokers and this client to trust each other, "
                    f"found: {self._denied}; check the user, the password and the certificates in "
                    "KafkaWal.config"
                )
            if code in (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC):
                if time.monotonic() < min(deadline, started + _NEW_TOPIC_SECS):
                    time.sleep(_POLL_SECS)
                    continue
                raise OptionError(
                    f"{self._name}: expected it to exist, found no such topic; create it, see "
                    "docs/how-to/kafka.md"
                )
            if code in (codes.TOPIC_AUTHORIZATION_FAILED, codes.CLUSTER_AUTHORIZATION_FAILED):
                raise StorageError(
                    f"{self._name}: expected access, found that the brokers refuse it; grant it to "
                    "this user"
                )
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{self._name}: expected an answer within {timeout_secs:g} s, found none"
                    f"{self.reported_errors()}; check bootstrap.servers and the brokers"
                )

    def topic_options(self) -> dict[str, str]:
        """Returns the options of the topic; none if this user may not see them."""
        admin = self._kafka.admin
        asked = admin.ConfigResource(admin.ResourceType.TOPIC, self.topic)
        with self.errors("read the options"):
            try:
                reported = self.client.describe_configs([asked], request_timeout=REQUEST_SECS)
                found = reported[asked].result(REQUEST_SECS)
            except self._kafka.KafkaException as error:
                if error.args[0].code() == self._kafka.KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise StorageError(
                        f"{self._name}: expected to read its options, found that the brokers "
                        "refuse it; grant DESCRIBE_CONFIGS to this user"
                    ) from None
                raise
        return {name: one.value for name, one in found.items() if one.value is not None}

    def offsets(self, partition: int) -> Offsets:
        """Returns what a partition holds."""
        at = self._kafka.TopicPartition(self.topic, partition)
        deadline = time.monotonic() + REQUEST_SECS
        while True:
            try:
                found = self.client.get_watermark_offsets(at, timeout=5.0, cached=False)
                if found is not None:
                    return Offsets(*found)
            except self._kafka.KafkaException as error:
                if time.monotonic() >= deadline:
                    raise self._error("look up the offsets", error) from None
            self.client.poll(0)
            if time.monotonic() >= deadline:
                raise StorageError(
                    f"{self._name}: expected the offsets of partition {partition}, found no answer "
                    f"within {REQUEST_SECS:g} s; check the brokers"
                )

    def messages(self, spans: Mapping[int, Offsets], *, follow: bool) -> Iterator[Message]:
        """See ``Topic.read``."""
        left = {one: span for one, span in spans.items() if span.start < span.stop}
        if not left:
            return
        if self._positions != {one: span.start for one, span in spans.items()}:
            self._assign(spans if follow else left)
        is_followed = False
        try:
            since = time.monotonic()
            while left:
                # It would wait for messages that do not exist.
                count = min(sum(span.stop - span.start for span in left.values()), _READ_MESSAGES)
                with self.errors("read"):
                    found = self.client.consume(count, timeout=_POLL_SECS)
                if found:
                    since = time.monotonic()
                elif time.monotonic() - since > REQUEST_SECS:
                    raise StorageError(
                        f"{self._name}: expected messages within {REQUEST_SECS:g} s, found none"
                        f"{self.reported_errors()}; check the brokers"
                    )
                for message in found:
                    yield from self._received(message, left, follow)
            is_followed = follow
        finally:
            if not is_followed:
                self._positions.clear()
                with contextlib.suppress(Exception):
                    self.client.unassign()

    def _assign(self, left: Mapping[int, Offsets]) -> None:
        self._positions = {partition: span.start for partition, span in left.items()}
        at = [self._kafka.TopicPartition(self.topic, n, span.start) for n, span in left.items()]
        with self.errors("read"):
            self.client.assign(at)

    def _received(self, message: Any, left: dict[int, Offsets], follow: bool) -> Iterator[Message]:
        """Yields a message that was asked for; removes partitions that are complete."""
        codes, error = self._kafka.KafkaError, message.error()
        partition, offset = message.partition(), message.offset()
        code = None if error is None else error.code()
        gone = codes._AUTO_OFFSET_RESET, codes.OFFSET_OUT_OF_RANGE
        handled = codes._PARTITION_EOF, codes._ALL_BROKERS_DOWN, *gone
        if error is not None and code not in handled and not error.retriable():
            raise self._error("read", self._kafka.KafkaException(error))
        start, stop = left.get(partition, Offsets(0, 0))
        if code is None:
            self._positions[partition] = offset + 1
            is_wanted = start <= offset < stop or (follow and offset >= stop)
            if is_wanted and message.value() is not None:
                yield Message(partition, offset, message.value())
            start = max(start, offset + 1)
        elif code == codes._PARTITION_EOF:
            # The last offsets may hold no message; a new leader may not know all of them yet.
            start = max(start, offset)
        elif code in gone:
            # Messages were deleted since.
            start = max(start, self.offsets(partition).start)
            left[partition] = Offsets(start, stop)
            self._assign(left)
        left[partition] = Offsets(start, stop)
        if start >= stop:
            del left[partition]

    def delete_records(self, offsets: Mapping[int, int]) -> None:
        """See ``Topic.truncate``."""
        asked = [self._kafka.TopicPartition(self.topic, *one) for one in sorted(offsets.items())]
        with self.errors("delete records"):
            reported = self.client.delete_records(asked, request_timeout=REQUEST_SECS)
            for done in reported.values():
                done.result(REQUEST_SECS)

    @contextlib.contextmanager
    def errors(self, action: str) -> Iterator[None]:
        """Converts errors of the library."""
        try:
            yield
        except self._kafka.KafkaException as error:
            raise self._error(action, error) from None

    def _error(self, action: str, error: Any) -> DeltackptError:
        reported = self.redacted(error.args[0].str())
        if error.args[0].code() == self._kafka.KafkaError._INVALID_ARG:
            return OptionError(
                f"KafkaWal.config: expected settings of librdkafka, found: {reported}"
            )
        return StorageError(
            f"{self._name}: expected to {action}, found: {reported}; check the brokers and the "
            "permissions of this user"
        )

    def reported_errors(self) -> str:
        """Returns the errors that the library reported, for a message."""
        return "".join(f" ({one})" for one in sorted(self.failures))

    def redacted(self, text: str) -> str:
        """Returns a text of the library without secrets of the configuration."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text

    def _failed(self, error: Any) -> None:
        """Called by the library, within a call; only here does it report a wrong password."""
        text = self.redacted(error.str())
        if error.code() in (self._kafka.KafkaError._AUTHENTICATION, self._kafka.KafkaError._SSL):
            self._denied = text
        if len(self.failures) < 4:
            self.failures.add(text)


class _QuietLog:
    """Receives what librdkafka logs, and keeps one line per second."""

    def __init__(self, redacted: Callable[[str], str]):
        self._redacted = redacted
        self._not_before = 0.0

    def log(self, level: int, template: str, *values: object) -> None:
        """Called by librdkafka."""
        now = time.monotonic()
        if now >= self._not_before:
            self._not_before = now + _LOG_SECS
            _logger.log(min(level, logging.WARNING), "%s", self._redacted(template % values))


def _library() -> Any:
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise MissingExtra(
            f"expected confluent-kafka for deltackpt.wal.KafkaWal, found none ({error}); install "
            "it: pip install 'deltackpt[kafka]'"
        ) from error
    return confluent_kafka
