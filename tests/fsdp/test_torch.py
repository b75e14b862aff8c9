"""torch still has the doors that the backend uses, and nothing of FSDP2's own is named."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import hvd_dyncomp
from hvd_dyncomp import fsdp
from hvd_dyncomp.fsdp.backend import Replicas

pytestmark = pytest.mark.promise("Changes in Horovod's optimizer or in FSDP2 are detected.")

PAGE = Path(__file__).parents[2] / "docs" / "fsdp.md"
SOURCES = Path(hvd_dyncomp.__file__).parent


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    fsdp.register_backend(4)
    names, override = ("replicate", "shard"), {"replicate": "hvd_dyncomp"}
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=names, backend_override=override)
    dist.destroy_process_group()


def test_the_page_names_the_version_that_is_tested():
    [named] = re.findall(r"Written for torch (\S+),", PAGE.read_text(encoding="utf-8"))
    assert torch.__version__.startswith(f"{named}."), "read FSDP2's source, then the page"


def test_the_hook_takes_one_tensor():
    assert list(inspect.signature(FSDPModule.set_all_reduce_hook).parameters) == ["self", "hook", "stream"]


def test_no_private_name_of_fsdp2_is_used():
    """Which its next version may lack: what FSDP2's modules and their states have, but for names that others have."""
    private = re.compile(r"_get_fsdp_state|_fsdp_|fsdp_params|mesh_info|_all_reduce_hook\b|_unsharded|_sharded_param")
    for path in (SOURCES / "fsdp").glob("*.py"):
        found = {match for match in private.findall(path.read_text(encoding="utf-8")) if match != "_all_reduce_hook"}
        assert not found, path


def test_a_mesh_has_the_group(alone):
    group = alone.get_group("replicate")
    assert type(group) is Replicas and type(alone.get_group("shard")) is not Replicas
    for module in (fully_shard(nn.Linear(2, 2), mesh=alone), replicate(nn.Linear(2, 2), mesh=alone["replicate"])):
        assert isinstance(module, FSDPModule)
        quantizer = fsdp.attach(module)
        module(torch.ones(1, 2)).sum().backward()  # of one rank: nothing is sent
        assert quantizer.meter.total().steps == 0 and module.bias.grad.full_tensor().tolist() == [1, 1]


def test_all_that_exchanges_something_passes_through():
    """What torch's groups have: a name that is new would go by the class whose sums may hang."""
    own = {name for name in vars(dist.ProcessGroup) if not name.startswith("__")}
    others = {
        *("BackendType", "CUSTOM", "GLOO", "MPI", "NCCL", "UCC", "UNDEFINED", "XCCL", "_backend_id", "_device_types"),
        *("_enable_collectives_timing", "_get_backend", "_get_backend_name", "_get_sequence_number_for_group"),
        *("_has_hooks", "_id", "_pybind11_conduit_v1_", "_register_backend", "_register_on_completion_hook"),
        *("_set_default_backend", "_set_group_desc", "_set_group_name", "_set_sequence_number_for_group"),
        *(
            "_wait_for_pending_works",
            "abort",
            "bound_device_id",
            "boxed",
            "get_group_store",
            "group_desc",
            "group_name",
        ),
        *("merge_remote_group", "name", "rank", "set_timeout", "shutdown", "size", "split_group", "unbox"),
        "use_pg_for_symm_mem_rendezvous",
    }
    assert own - others == own & vars(Replicas).keys()


def test_a_torch_without_fsdp2_is_named(monkeypatch):
    """Before 2.6 fully_shard was elsewhere; its modules are none that anybody could name."""
    monkeypatch.delattr(torch.distributed.fsdp, "FSDPModule")
    with pytest.raises(RuntimeError, match=rf"fsdp of torch {re.escape(torch.__version__)} has no 'FSDPModule'"):
        fsdp.register_backend(4)


def test_a_mesh_that_is_made_too_early():
    """torch says that it does not know the backend. In a process of its own: others may have registered it."""
    program = (
        "import torch.distributed as dist; from torch.distributed.device_mesh import init_device_mesh;"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1);"
        "init_device_mesh('cpu', (1,), mesh_dim_names=('replicate',), backend_override={'replicate': 'hvd_dyncomp'})"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode and "Unknown backend type hvd_dyncomp" in done.stderr
