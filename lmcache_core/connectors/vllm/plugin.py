"""What vLLM's plugin system calls in each of its processes: the connector's name is known there then.

Without it vLLM finds the connector by `kv_connector_module_path`, in the processes that make one. But its API server
looks for the children of a `MultiConnector` by name alone, when it counts what they have done.
"""

from __future__ import annotations

__all__ = ["register"]

NAME = "LMCacheCoreConnector"


def register() -> None:
    """Tell vLLM the connector's name. May be called any number of times."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "lmcache_core.connectors.vllm.connector", NAME)
