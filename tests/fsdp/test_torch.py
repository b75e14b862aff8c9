"""torch's FSDP2 is still the one that fsdp/units.py has been read from: its names, the hook, and the version."""

import inspect
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from hvd_dyncomp.fsdp import units
from hvd_dyncomp.fsdp.alone import Alone

pytestmark = pytest.mark.promise("Changes in Horovod's optimizer or in FSDP2 are detected.")

PAGE = Path(__file__).parents[2] / "docs" / "fsdp.md"


@pytest.fixture
def alone():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    dist.destroy_process_group()


def test_the_page_names_the_version_that_is_tested():
    [named] = re.findall(r"Written for torch (\S+),", PAGE.read_text(encoding="utf-8"))
    assert torch.__version__.startswith(f"{named}."), "read FSDP2's source, then units.py and the page"


def test_the_hook_takes_one_tensor():
    assert list(inspect.signature(FSDPModule.set_all_reduce_hook).parameters) == ["self", "hook", "stream"]


def test_every_name_that_is_read_exists(alone):
    """Also those which only some models or settings lead to, or whose absence would count as a value."""
    text = inspect.getsource(units)
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    [unit] = units.units_of(module)
    group = unit._group
    info = group.mesh_info
    of_group = set(re.findall(r"\bgroup\.(\w+)", text)) | set(re.findall(r"\b_group\.(\w+)", text))
    of_parameter = set(re.findall(r"\beach\.(\w+)", text))
    of_mesh = set(re.findall(r"\b(?:info|mesh_info)\.(\w+)", text))
    assert len(of_group) > 5 and len(of_parameter) > 5 and len(of_mesh) == 4
    assert of_group <= {*units._OF_GROUP} and of_parameter <= {*units._OF_PARAMETER}
    assert of_mesh == {*units._OF_MESH, *units._OF_SHARDS, *units._OF_REPLICAS}
    for owner, names in ((group, of_group), (group.fsdp_params[0], of_parameter), (info, of_mesh)):
        assert {name for name in names if not hasattr(owner, name)} == set()
    assert group.fsdp_params[0].sharded_state.name == "SHARDED"
    module(torch.ones(1, 2))
    assert group.fsdp_params[0]._unsharded_param.grad is None  # read where it exists


def test_fsdp_takes_an_equal_mesh_for_its_own(alone):
    """Or it would gather parameters among other ranks after forward."""
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    [unit] = units.units_of(module)
    before, group = unit._group.mesh_info, unit._group
    unit.average_by(lambda flat: None)
    assert group.mesh_info is not before and group.mesh_info == before == group.post_forward_mesh_info
    assert type(group._all_reduce_process_group) is Alone and before.replicate_process_group == unit.replica_group


@pytest.mark.parametrize(
    ("state", "groups"),
    [
        (SimpleNamespace(_fsdp_param_groups=["one", "another"], _fsdp_param_group="one"), ["one", "another"]),
        (SimpleNamespace(_fsdp_param_group="one"), ["one"]),  # up to torch 2.11
        (SimpleNamespace(_fsdp_param_group=None), []),
    ],
)
def test_parameter_groups_by_both_of_their_names(state, groups):
    assert units._groups(SimpleNamespace(_get_fsdp_state=lambda: state)) == groups


def test_a_name_that_is_gone_is_an_error_with_the_version(alone, monkeypatch):
    """Before a step reads it, where it would be an error in a hook."""
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    monkeypatch.setattr(units, "_OF_GROUP", (*units._OF_GROUP, "reduce_scatter_gone"))
    with pytest.raises(RuntimeError, match=rf"of torch {re.escape(torch.__version__)} has no '.*_gone'"):
        units.units_of(module)


def test_a_torch_without_fsdp2_is_named(alone, monkeypatch):
    """Before 2.6 fully_shard was elsewhere; its modules are none that anybody could name."""
    module = fully_shard(nn.Linear(2, 2), mesh=alone)
    monkeypatch.delattr(torch.distributed.fsdp, "FSDPModule")
    with pytest.raises(RuntimeError, match=rf"fsdp of torch {re.escape(torch.__version__)} has no 'FSDPModule'"):
        units.units_of(module)
