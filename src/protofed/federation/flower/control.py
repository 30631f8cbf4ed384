"""The server's end: a run at a SuperLink, the nodes that are there, and the messages of the run."""

import hashlib
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

import httpx
from flwr.cli.build import build_fab_from_files
from flwr.common.constant import SubStatus
from flwr.common.serde import fab_to_proto
from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, StartRunRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    GetNodesRequest,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PullTaskInputRequest,
    PushAppMessagesRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

from protofed.federation.flower.fleet import bounded, called
from protofed.federation.flower.outcomes import BadParcel, RunOver, SiteNode, Turned, Unreachable
from protofed.federation.flower.records import SERVER_NODE, Incoming, Outgoing, opened
from protofed.federation.keys import PublicKey, public_text
from protofed.federation.signing import Signed

HEARTBEAT = 10.0
"""Seconds. The SuperLink ends a run whose server was not heard of for a minute."""
TOKEN_HEADER = "protofed-token"  # noqa: S105, it is the name of one
BUNDLE = b"""[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "protofed"
version = "0.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "protofed"
[tool.flwr.app.components]
serverapp = "protofed:none"
clientapp = "protofed:none"
"""
"""Flower starts no run without a bundle. This one has no code, and nobody fetches it."""

Client = TypeVar("Client", ControlHttpClient, RuntimeHttpClient)


class Access(NamedTuple):
    """How the server reaches its SuperLink."""

    address: str
    authority: bytes
    token: str
    """What a SuperLink of ours asks of whoever is not a site; empty for another one."""

    def client(self, kind: type[Client], component: str, *more: Any) -> Client:
        interceptors = [_Token(self.token), RuntimeVersionHttpInterceptor(component_name=component), *more]
        return bounded(kind.from_server_address(self.address, False, self.authority, interceptors))


class _Token:
    def __init__(self, token: str) -> None:
        self._token = token

    def intercept(self, context: Any, call_next: Any) -> httpx.Response:
        if self._token:
            context.request.headers[TOKEN_HEADER] = self._token
        response: httpx.Response = call_next(context)
        return response


class Control:
    """What the server asks of a SuperLink outside a run."""

    def __init__(self, access: Access) -> None:
        self._client = access.client(ControlHttpClient, "flwr CLI")

    def nodes(self, keys: Mapping[str, PublicKey]) -> dict[str, SiteNode]:
        """The sites that have registered keys, by name. A key decides which site a node is, never what it says."""
        names = {public_text(key).strip(): site for site, key in keys.items()}
        response = called(self._client.ListNodes, ListNodesRequest())
        return dict(_sites(response.nodes_info, names))

    def register(self, keys: Mapping[str, PublicKey]) -> None:
        """Lets the sites of these keys in."""
        known = self.nodes(keys)
        for site, key in keys.items():
            if site not in known:
                request = RegisterNodeRequest(public_key=public_text(key).encode(), name=site)
                called(self._client.RegisterNode, request)

    def start_run(self) -> int:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of what Flower itself calls
            data, _ = build_fab_from_files({"pyproject.toml": BUNDLE, "README.md": b"protofed\n"})
        fab = Fab(hashlib.sha256(data).hexdigest(), data, {})
        request = StartRunRequest(fab=fab_to_proto(fab), federation=NOOP_FEDERATION_ID)
        run: int = called(self._client.StartRun, request).run_id
        return run

    def close(self) -> None:
        self._client.close()


class Session:
    """A run at the SuperLink, from its start until it ends, whoever ends it."""

    def __init__(self, access: Access, keys: Mapping[str, PublicKey]) -> None:
        self._names = {public_text(key).strip(): site for site, key in keys.items()}
        self._coming: dict[str, tuple[str, Incoming]] = {}
        """Answers that have begun to come, and Flower's names of them, by the name of what they answer."""
        control = Control(access)
        try:
            control.register(keys)
            self.run = control.start_run()
        finally:
            control.close()
        token = _claimed(access, self.run)
        own = RuntimeTokenHttpInterceptor(token=token)
        self._client = access.client(RuntimeHttpClient, "flwr-serverapp", own)
        called(self._client.PullTaskInput, PullTaskInputRequest())
        self._over = threading.Event()
        self._stop = threading.Event()
        beating = access.client(RuntimeHttpClient, "flwr-serverapp", own)
        self._heart = threading.Thread(target=self._beat, args=(beating,), daemon=True, name="heartbeat")
        self._heart.start()

    @property
    def is_over(self) -> bool:
        """Whether the SuperLink has ended the run: another one must be started."""
        return self._over.is_set()

    def nodes(self) -> dict[str, SiteNode]:
        """The sites that are there, by name."""
        return dict(_sites(called(self._client.GetNodes, GetNodesRequest()).nodes, self._names))

    def send(self, node: int, message: Signed) -> str:
        """Sends a message to a site. The name under which its answer is asked for."""
        outgoing = Outgoing(message, self.run, SERVER_NODE, node, "")
        request = PushAppMessagesRequest(messages_list=[outgoing.announcement], message_object_trees=[outgoing.tree])
        response = called(self._client.PushMessages, request)
        if list(response.message_ids) != [outgoing.id]:
            raise Unreachable("the SuperLink did not take a message: its site is not there any more")
        for name in dict.fromkeys(response.objects_to_push):
            push = PushObjectRequest(
                node=Node(node_id=SERVER_NODE),
                run_id=self.run,
                object_id=name,
                object_content=outgoing.objects[name],
                session_id=response.session_id,
            )
            if not called(self._client.PushObject, push).stored:
                raise Unreachable("the SuperLink took too long to take a message")
        return outgoing.id

    def answers(self, sent: Mapping[str, int]) -> Iterator[tuple[str, Signed | str]]:
        """What came to messages with these names, of at most so many bytes each, or what became of them. Of an answer
        that its site is still sending, the rest is taken the next time: others do not wait for it."""
        asked = [name for name in sent if name not in self._coming]
        request = PullAppMessagesRequest(message_ids=asked)
        response = called(self._client.PullMessages, request) if asked else PullAppMessagesResponse()
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            name = message.metadata.reply_to_message_id
            if name not in sent:
                continue
            if message.HasField("error"):
                yield name, f"Flower says {message.error.code}: {message.error.reason}"
                continue
            self._coming[name] = message.metadata.message_id, Incoming(tree, sent[name])
        for name, (own, incoming) in list(self._coming.items()):
            try:
                if name in sent and not incoming.is_whole(self._pull):  # guard: no-site-waits-for-another-s-answer
                    continue
                del self._coming[name]
                if name in sent:
                    yield name, self._received(own, incoming)
            except BadParcel as error:
                self._coming.pop(name, None)
                yield name, str(error)

    def close(self, status: str = SubStatus.COMPLETED) -> None:
        """Ends the run at the SuperLink, if that is there."""
        self._stop.set()
        with suppress(Unreachable, Turned, RunOver):  # it ends the run by itself when it hears no more of it
            called(self._client.PushTaskOutput, PushTaskOutputRequest(sub_status=status, details=""))
        self._client.close()

    def _pull(self, name: str) -> Any:
        request = PullObjectRequest(node=Node(node_id=SERVER_NODE), run_id=self.run, object_id=name)
        return called(self._client.PullObject, request)

    def _received(self, name: str, incoming: Incoming) -> Signed:
        node = Node(node_id=SERVER_NODE)
        received = ConfirmMessageReceivedRequest(node=node, run_id=self.run, message_object_id=name)
        called(self._client.ConfirmMessageReceived, received)
        return opened(name, incoming.contents)

    def _beat(self, client: RuntimeHttpClient) -> None:
        while not self._stop.is_set():
            try:
                if not called(client.SendTaskHeartbeat, SendTaskHeartbeatRequest()).success:
                    self._over.set()
            except Unreachable:
                pass
            except (Turned, RunOver):
                self._over.set()
            if self._over.is_set():
                break
            self._stop.wait(HEARTBEAT)
        client.close()


def _claimed(access: Access, run: int) -> str:
    """The token of a run's task. Tasks of other runs at this SuperLink are none of ours: they are ended."""
    client = access.client(RuntimeHttpClient, "SuperExec")
    try:
        while True:
            request = AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP])
            found = called(client.AcquireTask, request)
            if not found.HasField("task") or not found.token:
                raise Unreachable("the SuperLink gave the run to somebody else")
            if found.task.run_id == run:
                return str(found.token)
            _refuse(access, found.token)
    finally:
        client.close()


def _refuse(access: Access, token: str) -> None:
    client = access.client(RuntimeHttpClient, "flwr-serverapp", RuntimeTokenHttpInterceptor(token=token))
    try:
        called(client.PullTaskInput, PullTaskInputRequest())
        called(client.PushTaskOutput, PushTaskOutputRequest(sub_status=SubStatus.FAILED, details="not this server's"))
    except (Turned, RunOver):
        pass  # it has ended already
    finally:
        client.close()


def _sites(nodes: Sequence[Any], names: Mapping[str, str]) -> Iterator[tuple[str, SiteNode]]:
    for node in nodes:
        site = names.get(bytes(node.public_key).decode("ascii", "replace").strip())
        if site is not None and node.status != "unregistered":
            yield site, SiteNode(node.node_id, node.status == "online", node.last_activated_at)
