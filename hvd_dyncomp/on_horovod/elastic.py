"""Elastic training: `hvd.elastic.TorchState` keeps quantizers and controllers.

    state = hvd.elastic.TorchState(model, optimizer, quantizer=quantizer, controller=controller, epoch=0)

`commit` saves the residuals, the step count and the controller's history. `restore` goes back to them. `sync` brings
workers that join to the level and the step of rank 0. Importing `hvd_dyncomp` registers both handlers; there is nothing
to call.

After a change of ranks the quantizer rebuilds its buckets by itself at the next gradient, and residuals begin at zero.
"""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.on_horovod.quantizer import DynamicQuantizer
from hvd_dyncomp.transport import horovod


class ControllerHandler(horovod.StateHandler):
    """Keep a `Controller` in a `TorchState`."""

    def __init__(self, value: Controller | DynamicQuantizer) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        self._saved: dict[str, Any] = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.sync()
        self.save()  # as Horovod's own handlers do: what was saved before may belong to another rank


class QuantizerHandler(ControllerHandler):
    """Keep a `DynamicQuantizer` in a `TorchState`."""

    def restore(self) -> None:
        self.value._reset()
        super().restore()


horovod.register_state_handler(DynamicQuantizer, QuantizerHandler)
horovod.register_state_handler(Controller, ControllerHandler)
