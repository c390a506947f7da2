"""What the processes of a machine are told of its network."""

import subprocess
import sys

import pytest

from engine.hosts.machines.agent import AgentTask


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


@pytest.mark.skipif(sys.platform == "win32", reason="torch opens its own there")
def test_the_agents_meet_at_the_address_of_the_rendezvous_alone() -> None:
    """torchrun uses the store that its process has at that port."""
    code = (
        "import sys, psutil\n"
        "from torch.distributed.elastic.rendezvous import static_tcp_rendezvous as static\n"
        "from engine.hosts.machines.agent import AgentTask, _own_store\n"
        "from engine.hosts.machines.interfaces import free_port\n"
        "port = free_port('127.0.0.1', 0)\n"
        "store = _own_store(AgentTask(1, 0, 'a', '127.0.0.1', port, 'lo'))\n"
        "agents = static.StaticTCPRendezvous('127.0.0.1', port, 0, 1, 'tandem', 30)\n"
        "found = agents.next_rendezvous()\n"
        "found.store.set('a', 'b')\n"
        "assert found.store.get('a') == b'b'\n"
        "listening = [c.laddr.ip for c in psutil.Process().net_connections('tcp')"
        " if c.status == psutil.CONN_LISTEN]\n"
        "assert listening == ['127.0.0.1'], listening\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert not done.returncode, done.stderr
