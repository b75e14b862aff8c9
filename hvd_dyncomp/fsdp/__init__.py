"""The exchange between replicas of a model that FSDP2 shards, or that `replicate` copies: a backend of torch's.

hvd_dyncomp.fsdp.register_backend(4)
axes, ours = ("replicate", "shard"), {"replicate": "hvd_dyncomp"}
mesh = init_device_mesh("cuda", (hosts, ranks_per_host), mesh_dim_names=axes, backend_override=ours)
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
quantizer = hvd_dyncomp.fsdp.attach(model)
"""

from __future__ import annotations

from hvd_dyncomp.fsdp.entry import attach, register_backend
from hvd_dyncomp.fsdp.quantizer import Quantizer

__all__ = ["Quantizer", "attach", "register_backend"]
