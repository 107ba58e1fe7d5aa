"""Messages as bytes, for queues that carry bytes: several in one, a node's of one turn.

A line of JSON that describes them, then their lines as they are in the files. A server then handles
an entry a node and second, not one a rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from megascale.telemetry.path.queue import MOST_BYTES, Message, QueueError

_VERSION = 1


def pack(messages: Sequence[Message]) -> bytes:
    heads = [[m.source, m.rank, m.offset, m.passed_over, len(m.lines)] for m in messages]
    head = json.dumps({"v": _VERSION, "messages": heads}, separators=(",", ":")).encode()
    return b"\n".join([head, b"".join([message.lines for message in messages])])


def unpack(data: bytes) -> list[Message]:
    """QueueError: these are no messages, or of another version."""
    head, _, lines = data.partition(b"\n")
    try:
        described = json.loads(head)
        if described["v"] != _VERSION:
            raise ValueError(f"version {described['v']}, not {_VERSION}")
        messages, begin = [], 0
        for source, rank, offset, passed_over, size in described["messages"]:
            messages.append(Message(source, rank, offset, lines[begin : begin + size], passed_over))
            begin += size
    except (ValueError, KeyError, TypeError) as error:
        raise QueueError(f"an entry of the queue is no message ({error}): {data[:80]!r}") from None
    if begin != len(lines):
        raise QueueError(f"an entry of the queue has {len(lines)} bytes, and says {begin}")
    return messages


def groups(messages: Sequence[Message], most_bytes: int = MOST_BYTES) -> Iterator[list[Message]]:
    """In order, in groups of at most `most_bytes`, or one message."""
    group, size = list[Message](), 0
    for message in messages:
        if group and size + len(message.lines) > most_bytes:
            yield group
            group, size = [], 0
        group.append(message)
        size += len(message.lines)
    if group:
        yield group
