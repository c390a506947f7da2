"""What the processes of a machine are told of its network."""

import pytest

from engine.machines.agent import AgentTask


def network(interface: str) -> dict[str, str]:
    return AgentTask(2, 1, "b", "10.0.0.1", 11437, interface).network()


def test_values_take_the_chosen_interface_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_IB_DISABLE", raising=False)
    found = network("wg0")
    assert found["GLOO_SOCKET_IFNAME"] == "wg0"
    assert found["NCCL_SOCKET_IFNAME"] == "=wg0", "no prefix of others"
    assert found["NCCL_IB_DISABLE"] == "1"
    assert network("ib0")["NCCL_IB_DISABLE"] == "0"
    assert found["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0", "agents end the processes"
    monkeypatch.setenv("NCCL_IB_DISABLE", "0")
    assert network("wg0")["NCCL_IB_DISABLE"] == "0", "what a person has set stays"
