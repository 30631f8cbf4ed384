"""What is used of Flower's inner parts, by name and form. Another version may have others: then this says which."""

import dataclasses
import inspect
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs Flower: pip install 'protofed[flower]'")

import httpx

from federation.test_imports_of_flower import names_used
from protofed.federation.site_check import FLOWER

FORMS = {
    "flwr.app.message.make_message": "metadata content error",
    "flwr.app.message.remove_content_from_message": "message",
    "flwr.cli.build.build_fab_from_files": "files",
    "flwr.common.serde.fab_to_proto": "fab",
    "flwr.common.serde.message_to_proto": "message",
    "flwr.supercore.fab.Fab": "hash_str content verifications",
    "flwr.supercore.inflatable.inflatable_object.get_all_nested_objects": "obj",
    "flwr.supercore.inflatable.inflatable_object.get_object_tree": "obj",
    "flwr.supercore.inflatable.inflatable_object.iterate_object_tree": "tree",
    "flwr.supercore.inflatable.inflatable_object.no_object_id_recompute": "",
    "flwr.supercore.inflatable.inflatable_utils.inflate_object_from_contents": (
        "object_id object_contents keep_object_contents objects"
    ),
    "flwr.supercore.interceptors.RuntimeTokenHttpInterceptor": "token",
    "flwr.supercore.interceptors.RuntimeVersionHttpInterceptor": "component_name",
    "flwr.supernode.node_auth_http_interceptor.NodeAuthHttpInterceptor": "private_key public_key",
    "flwr.superlink.main.create_app": "config superlink_lifespan_class",
    "flwr.superlink.cli.flower_superlink.SuperLinkLifespan": "config state_factory",
    "flwr.superlink.cli.flower_superlink._parse_superlink_lifespan_config": "",
    "flwr.app.Metadata": (
        "run_id message_id src_node_id dst_node_id reply_to_message_id group_id created_at ttl message_type "
        "src_task_id dst_task_id"
    ),
    "flwr.app.RecordDict": "records parameters_records metrics_records configs_records",
    "flwr.app.ConfigRecord": "config_dict keep_input",
}
"""The arguments of what is called, in their order."""
CLIENTS = {
    "flwr.supernode.fleet_http_client.FleetHttpClient": (
        "ActivateNode DeactivateNode SendNodeHeartbeat PullMessages PushMessages PullObject PushObject "
        "ConfirmMessageReceived"
    ),
    "flwr.supercore.runtime.RuntimeHttpClient": (
        "AcquireTask SendTaskHeartbeat PullTaskInput PushTaskOutput PushObject PullObject ConfirmMessageReceived "
        "PushMessages PullMessages GetNodes"
    ),
    "flwr.supercore.control.ControlHttpClient": "RegisterNode StartRun ListNodes",
}
"""The calls of each client."""
FIELDS = {
    "flwr.proto.fleet_pb2.ActivateNodeRequest": "public_key heartbeat_interval",
    "flwr.proto.fleet_pb2.ActivateNodeResponse": "node_id",
    "flwr.proto.fleet_pb2.DeactivateNodeRequest": "node_id",
    "flwr.proto.fleet_pb2.PullMessagesRequest": "node",
    "flwr.proto.fleet_pb2.PullMessagesResponse": "messages_list message_object_trees",
    "flwr.proto.fleet_pb2.PushMessagesRequest": "node messages_list message_object_trees clientapp_runtime_list",
    "flwr.proto.fleet_pb2.PushMessagesResponse": "objects_to_push session_id",
    "flwr.proto.heartbeat_pb2.SendNodeHeartbeatRequest": "node heartbeat_interval",
    "flwr.proto.heartbeat_pb2.SendNodeHeartbeatResponse": "success",
    "flwr.proto.message_pb2.ConfirmMessageReceivedRequest": "node run_id message_object_id",
    "flwr.proto.message_pb2.ObjectTree": "object_id children",
    "flwr.proto.message_pb2.PullObjectRequest": "node run_id object_id",
    "flwr.proto.message_pb2.PullObjectResponse": "object_found object_available object_content",
    "flwr.proto.message_pb2.PushObjectRequest": "node run_id object_id object_content session_id",
    "flwr.proto.message_pb2.PushObjectResponse": "stored",
    "flwr.proto.message_pb2.Message": "metadata content error",
    "flwr.proto.message_pb2.Metadata": "run_id message_id reply_to_message_id created_at ttl",
    "flwr.proto.node_pb2.Node": "node_id",
    "flwr.proto.node_pb2.NodeInfo": "node_id status last_activated_at public_key",
    "flwr.proto.control_pb2.RegisterNodeRequest": "public_key name",
    "flwr.proto.control_pb2.StartRunRequest": "fab federation",
    "flwr.proto.control_pb2.StartRunResponse": "run_id",
    "flwr.proto.control_pb2.ListNodesRequest": "",
    "flwr.proto.control_pb2.ListNodesResponse": "nodes_info",
    "flwr.proto.runtime_pb2.AcquireTaskRequest": "supported_task_types",
    "flwr.proto.runtime_pb2.AcquireTaskResponse": "task token",
    "flwr.proto.runtime_pb2.GetNodesRequest": "",
    "flwr.proto.runtime_pb2.GetNodesResponse": "nodes",
    "flwr.proto.runtime_pb2.PullAppMessagesRequest": "message_ids",
    "flwr.proto.runtime_pb2.PullAppMessagesResponse": "messages_list message_object_trees",
    "flwr.proto.runtime_pb2.PullTaskInputRequest": "",
    "flwr.proto.runtime_pb2.PushAppMessagesRequest": "messages_list message_object_trees",
    "flwr.proto.runtime_pb2.PushAppMessagesResponse": "message_ids objects_to_push session_id",
    "flwr.proto.runtime_pb2.PushTaskOutputRequest": "sub_status details",
    "flwr.proto.runtime_pb2.SendTaskHeartbeatRequest": "",
    "flwr.proto.runtime_pb2.SendTaskHeartbeatResponse": "success",
}
"""The fields of messages that are written or read."""
OTHERS = {
    "flwr.app.Message",
    "flwr.common.constant.SubStatus",
    "flwr.supercore.constant.NOOP_FEDERATION_ID",
    "flwr.supercore.constant.TaskType",
    "flwr.supercore.protobuf.client.ProtobufClient",
}
ANSWERS = {
    name for name in FIELDS if name.endswith("Response") or name.split(".")[-1] in ("Message", "Metadata", "NodeInfo")
}
"""What is read without being named in an import."""


def found(name: str) -> Any:
    module, _, last = name.rpartition(".")
    return getattr(import_module(module), last)


def test_the_version_is_the_one_that_is_known() -> None:
    assert version("flwr") == FLOWER


def test_every_name_that_is_used_is_checked_here() -> None:
    checked = {*FORMS, *CLIENTS, *FIELDS, *OTHERS}
    assert names_used() <= checked
    assert checked - names_used() <= ANSWERS


@pytest.mark.parametrize("name", FORMS)
def test_what_is_called_has_its_arguments(name: str) -> None:
    assert list(inspect.signature(found(name)).parameters) == FORMS[name].split()


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_has_its_calls(name: str) -> None:
    client = found(name)
    for call in CLIENTS[name].split():
        assert list(inspect.signature(getattr(client, call)).parameters) == ["self", "request"]
    assert isinstance(client("https://localhost:8000")._client, httpx.Client)  # its answers are bounded
    arguments = list(inspect.signature(client.from_server_address).parameters)
    assert arguments == ["server_address", "insecure", "root_certificates", "interceptors", "retry_invoker"]


@pytest.mark.parametrize("name", FIELDS)
def test_a_message_has_its_fields(name: str) -> None:
    assert {*FIELDS[name].split()} <= {field.name for field in found(name).DESCRIPTOR.fields}


def test_constants_have_their_values() -> None:
    assert found("flwr.common.constant.SUPERLINK_NODE_ID") == 1
    assert found("flwr.common.constant.SubStatus").COMPLETED == "completed"
    assert found("flwr.supercore.constant.TaskType").SERVER_APP == "flwr-serverapp"
    assert found("flwr.supercore.constant.NodeStatus").ONLINE == "online"
    assert found("flwr.supercore.constant.NodeStatus").UNREGISTERED == "unregistered"
    assert found("flwr.common.constant.HEARTBEAT_MIN_INTERVAL") <= 10


def test_the_superlink_s_settings_have_those_that_are_read() -> None:
    config = import_module("flwr.superlink.config_loader").SuperLinkLifespanConfig
    assert {"host", "port", "ssl_keyfile", "ssl_certfile"} <= {field.name for field in dataclasses.fields(config)}


def test_the_command_line_of_the_superlink_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from protofed.federation import kits
    from protofed.federation.flower.superlink import command_line

    kits.init(tmp_path / "fed", ["A"], "127.0.0.1:8000")
    monkeypatch.setattr("sys.argv", command_line(tmp_path / "fed" / "server", "127.0.0.1", 8123))
    config = found("flwr.superlink.cli.flower_superlink._parse_superlink_lifespan_config")()
    assert (config.host, config.port, config.isolation, config.insecure) == ("127.0.0.1", 8123, "process", False)
    assert config.enable_supernode_auth
    assert not config.runtime_dependency_install
    assert config.ssl_keyfile == str(tmp_path / "fed" / "server" / "server.key")
