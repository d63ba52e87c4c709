"""The `vllm.endpoint_plugins` entry point: `GET /pdlab/instance`, what this instance is and what it registered.

Loaded only where `VLLM_PLUGINS` names `pdlab`. It answers facts; it neither reads KV memory nor changes anything.
"""

import asyncio
from typing import Any

from pdlab.inside.identity import identity


class InstanceEndpoint:
    """An `EndpointPlugin` of vLLM (`vllm.plugins.endpoint_plugins.interface`)."""

    name = "pdlab"
    required_tasks = ("generate",)

    def attach_router(self, app: Any) -> None:
        async def instance() -> dict[str, Any]:
            state = app.state
            layouts = await state.pdlab_engine_client.collective_rpc("pdlab_registered_kv")
            if state.pdlab_identity is None:
                state.pdlab_identity = await asyncio.to_thread(identity, state.vllm_config)
            return {**state.pdlab_identity, "workers": layouts}

        app.get("/pdlab/instance")(instance)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        state.pdlab_engine_client = engine_client
        state.pdlab_identity = None
