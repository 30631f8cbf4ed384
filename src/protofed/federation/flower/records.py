"""Signed messages as Flower's records: one record for header, signature and the first part, one more for each part."""

import time
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
WAITS = 0.05
"""Seconds until an object is asked for again that its sender is still sending."""
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


def fetched(tree: ObjectTree, pull: Callable[[str], PullObjectResponse], most_bytes: int) -> Mapping[str, bytes]:
    """The objects of a message, one after another; no more than so many bytes, and one part."""
    contents: dict[str, bytes] = {}
    room = most_bytes + ROOM
    for name in dict.fromkeys(one.object_id for one in iterate_object_tree(tree)):
        contents[name] = _fetched(name, pull)
        room -= len(contents[name])
        if room < 0:
            raise BadParcel(f"it is larger than {most_bytes} bytes")
    return contents


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


def _fetched(name: str, pull: Callable[[str], PullObjectResponse]) -> bytes:
    """A message can be seen before all of it is there."""
    end = time.monotonic() + SENDS_FOR
    while True:
        answer = pull(name)
        if not answer.object_found:
            raise BadParcel("a part of it is gone")
        if answer.object_available:
            content: bytes = answer.object_content
            return content
        if time.monotonic() > end:
            raise BadParcel("its sender stopped in the middle")
        time.sleep(WAITS)
