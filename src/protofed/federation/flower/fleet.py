"""A site's end: one connection that goes out to the SuperLink's Fleet API, with the site's key. Nothing listens."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import httpx
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.protobuf.client import ProtobufClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from protofed.federation.flower.outcomes import Delivery, OtherServer, RunOver, Turned, Unreachable
from protofed.federation.flower.records import SERVER_NODE, Incoming, Outgoing, opened
from protofed.federation.keys import PrivateKey, public_text
from protofed.federation.signing import Signed

HEARTBEAT = 10.0
"""Seconds. The SuperLink counts a site as gone after two that it misses."""
MAX_RESPONSE = 64 * 2**20
"""Bytes of what a SuperLink answers to one request. A part of a message is far smaller, and lists of parts are."""
WAITS = 0.05
"""Seconds until a part of an order is asked for again that the server is still sending."""


Client = TypeVar("Client", bound=ProtobufClient)


class Fleet:
    """The connection of one site. Not for several threads."""

    def __init__(self, address: str, authority: bytes, key: PrivateKey, clock: Callable[[], float] = time.monotonic):
        interceptors = [
            RuntimeVersionHttpInterceptor(component_name="SuperNode"),
            NodeAuthHttpInterceptor(key, key.public_key()),
        ]
        self._client = bounded(FleetHttpClient.from_server_address(address, False, authority, interceptors))
        self._public = public_text(key.public_key()).encode()
        self._clock = clock
        self._beaten = 0.0
        self._last: tuple[Signed, Delivery, Outgoing] | None = None
        self.node = 0

    def activate(self, before: int) -> None:
        """Says that the site is there. The process that was here before may have been killed: it is signed off, or the
        SuperLink would refuse this one for as long as it believes in the other."""
        if before:
            with suppress(Turned):  # it knows that the other is gone
                self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=before))
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT)
        self.node = self._call(self._client.ActivateNode, request).node_id
        self._beaten = self._clock()

    def deactivate(self) -> None:
        if self.node:
            self._call(self._client.DeactivateNode, DeactivateNodeRequest(node_id=self.node))
            self.node = 0

    def beat(self) -> None:
        """Says from time to time that the site is still there."""
        if self._clock() - self._beaten < HEARTBEAT * 0.7:
            return
        request = SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT)
        if not self._call(self._client.SendNodeHeartbeat, request).success:
            raise Turned("the SuperLink does not know this site any more")
        self._beaten = self._clock()

    def order(self, most_bytes: int) -> Delivery | None:
        """The next order, if there is one."""
        response = self._call(self._client.PullMessages, PullMessagesRequest(node=self._node))
        if not response.messages_list:
            return None
        metadata, tree = response.messages_list[0].metadata, response.message_object_trees[0]
        run, name = metadata.run_id, metadata.message_id

        def pull(one: str) -> Any:
            self.beat()
            return self._call(self._client.PullObject, PullObjectRequest(node=self._node, run_id=run, object_id=one))

        incoming = Incoming(tree, most_bytes)
        while not incoming.is_whole(pull):
            time.sleep(WAITS)
        received = ConfirmMessageReceivedRequest(node=self._node, run_id=run, message_object_id=name)
        self._call(self._client.ConfirmMessageReceived, received)
        return Delivery(run, name, opened(name, incoming.contents), metadata.created_at + metadata.ttl)

    def answer(self, delivery: Delivery, message: Signed) -> None:
        outgoing = self._outgoing(delivery, message)
        response = self._call(
            self._client.PushMessages,
            PushMessagesRequest(
                node=self._node,
                messages_list=[outgoing.announcement],
                message_object_trees=[outgoing.tree],
                clientapp_runtime_list=[0.0],
            ),
        )
        for name in dict.fromkeys(response.objects_to_push):
            self.beat()
            request = PushObjectRequest(
                node=self._node,
                run_id=delivery.run,
                object_id=name,
                object_content=outgoing.objects[name],
                session_id=response.session_id,
            )
            if not self._call(self._client.PushObject, request).stored:
                raise Unreachable("the SuperLink took too long to take the answer")

    def _outgoing(self, delivery: Delivery, message: Signed) -> Outgoing:
        """An answer that is sent again must have the name that it had: the SuperLink takes one answer to an order, and
        of that what is missing."""
        last = self._last
        if last is None or last[0] != message or last[1] != delivery:
            keep = delivery.end - time.time() - 1
            outgoing = Outgoing(message, delivery.run, self.node, SERVER_NODE, delivery.id, keep)
            self._last = last = message, delivery, outgoing
        return last[2]

    def close(self) -> None:
        self._client.close()

    @property
    def _node(self) -> Node:
        return Node(node_id=self.node)

    @staticmethod
    def _call(function: Callable[[Any], Any], request: Any) -> Any:
        return called(function, request)


def bounded(client: Client) -> Client:
    """The client; it reads no answer that is too large, or that does not say how large it is."""
    client._client.event_hooks["response"].append(_refuse_large)  # it is called before anything of the body is read
    return client


def _refuse_large(response: httpx.Response) -> None:
    size = response.headers.get("content-length", "")
    is_plain = response.headers.keys().isdisjoint(("content-encoding", "transfer-encoding"))
    # guard: federation-responses-bounded
    if not is_plain or not size.isdigit() or len(size) > 12 or int(size) > MAX_RESPONSE:
        raise Unreachable("its answer is too large, or does not say how large it is")


def called(function: Callable[[Any], Any], request: Any) -> Any:
    """What a call of the SuperLink gives. Its many errors become three."""
    try:
        return function(request)
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code == httpx.codes.FORBIDDEN:
            raise RunOver(_said(error.response)) from error
        if code in (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.GATEWAY_TIMEOUT):
            raise Unreachable(f"it says {code}") from error
        raise Turned(_said(error.response)) from error
    except httpx.TransportError as error:
        reason = str(error) or type(error).__name__
        if "CERTIFICATE_VERIFY_FAILED" in reason:
            raise OtherServer(f"its certificate is not good: {reason}") from error
        if "WRONG_VERSION_NUMBER" in reason:
            raise OtherServer("it does not speak TLS") from error
        raise Unreachable(reason) from error
    except httpx.HTTPError as error:
        raise Unreachable(f"{type(error).__name__}: {error}") from error
    except ValueError as error:  # guard: federation-unreadable-responses-end-nothing
        raise Unreachable(f"its answer cannot be read: {error}") from error


def _said(response: httpx.Response) -> str:
    return f"{response.status_code} {response.text[:200]}"
