"""Signed messages as Flower's records: one record for header, signature and the first part, one more for each part."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ObjectTree, PullObjectResponse
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from protofed.federation.flower.outcomes import BadParcel
from protofed.federation.signing import Signed

PART = 4 * 2**20
"""Bytes of a message that travel in one request."""
MAX_REQUEST = PART + 2**16
"""Bytes of one request to the SuperLink."""
KEEP_FOR = 7 * 24 * 3600.0
"""Seconds for which the SuperLink keeps a message that nobody fetches."""
SENDS_FOR = 60.0
"""Seconds for which nothing new may come of a message that its sender is still sending. Then it is asked for again."""
ROOM = 64 * 1024
"""Bytes of a message beside its content."""
SERVER_NODE = 1
"""The number that Flower gives to the server."""


class Outgoing:
    """A message that is to be sent: what is announced of it first, and its objects by name."""

    def __init__(
        self, message: Signed, run: int, sender: int, receiver: int, reply_to: str, keep: float = KEEP_FOR
    ) -> None:
        metadata = Metadata(
            run_id=run,
            message_id="",
            src_node_id=sender,
            dst_node_id=receiver,
            reply_to_message_id=reply_to,
            group_id="",
            created_at=time.time(),
            ttl=keep,
            message_type="train",
        )
        parcel = make_message(metadata, RecordDict(_records(message)))
        with no_object_id_recompute():
            self.id: str = parcel.object_id
            parcel.metadata.__dict__["_message_id"] = self.id
            self.tree: Any = get_object_tree(parcel)
            objects = get_all_nested_objects(parcel)
            self.objects: dict[str, bytes] = {name: one.deflate() for name, one in objects.items()}
            self.announcement: Any = message_to_proto(remove_content_from_message(parcel))


class Incoming:
    """A message that is fetched object by object. It can be seen before its sender has sent all of it."""

    def __init__(self, tree: ObjectTree, most_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.contents: dict[str, bytes] = {}
        self._missing = deque(dict.fromkeys(one.object_id for one in iterate_object_tree(tree)))
        self._most_bytes, self._room = most_bytes, most_bytes + ROOM
        self._clock, self._end = clock, clock() + SENDS_FOR

    def is_whole(self, pull: Callable[[str], PullObjectResponse]) -> bool:
        """Takes what is there by now, no more than so many bytes and one part. Raises BadParcel."""
        while self._missing:
            answer = pull(self._missing[0])
            if not answer.object_found:
                raise BadParcel("a part of it is gone")
            if not answer.object_available:
                if self._clock() > self._end:
                    raise BadParcel("its sender stopped in the middle")
                return False
            self.contents[self._missing.popleft()] = answer.object_content
            self._room -= len(answer.object_content)
            if self._room < 0:
                raise BadParcel(f"it is larger than {self._most_bytes} bytes")
            self._end = self._clock() + SENDS_FOR
        return True


def opened(message_id: str, contents: Mapping[str, bytes]) -> Signed:
    """The signed message in these objects. Of its form nothing is believed."""
    try:
        message = inflate_object_from_contents(message_id, dict(contents))
    except Exception as error:  # whatever somebody sent
        raise BadParcel(f"it cannot be read: {type(error).__name__}") from error
    if not isinstance(message, Message) or not message.has_content():
        raise BadParcel("it has no content")
    records = message.content
    names = [str(i) for i in range(len(records))]
    if not names or set(records) != set(names) or any(type(record) is not ConfigRecord for record in records.values()):
        raise BadParcel("it has other records than ours")
    head = records["0"]
    parts = [records[name].get("part") for name in names]
    values = (head.get("header"), head.get("signature"))
    if not all(type(value) is bytes for value in (*values, *parts)):
        raise BadParcel("it has other fields than ours")
    return Signed(*values, b"".join(parts))


def _records(message: Signed) -> dict[str, ConfigRecord]:
    parts: Sequence[bytes] = [message.body[i : i + PART] for i in range(0, max(len(message.body), 1), PART)]
    head = {"header": message.header, "signature": message.signature}
    return {str(i): ConfigRecord({"part": part, **(head if i == 0 else {})}) for i, part in enumerate(parts)}
