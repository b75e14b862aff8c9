"""Errors and warnings about the use of a quantizer. Warnings are logged once, on rank 0 only."""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)

ANOTHER_OPTIMIZER = (
    "a DynamicQuantizer works for one optimizer, and this one has another optimizer already; make one DynamicQuantizer "
    "per optimizer (they may share a controller). To replace the other optimizer, delete it and call gc.collect(): "
    "while it exists, Horovod reduces its gradients"
)

IN_FLIGHT = (
    "attach must be called between steps, but gradients are in flight: call optimizer.step() first, or attach before "
    "the first backward pass"
)

CAPTURED = (
    "gradients cannot be exchanged while a CUDA graph is captured: its replay calls no hooks, so every rank would use "
    "only its own gradients. Keep loss.backward() and optimizer.step() out of the graph; "
    "torch.cuda.make_graphed_callables does so (docs/gpus.md)"
)

INFERENCE = (
    "gradients cannot be exchanged in inference mode, because tensors made in it cannot be written later; call "
    "optimizer.step() outside of torch.inference_mode(), or use torch.no_grad() instead"
)

FORGOTTEN = (
    "Horovod has forgotten the gradients of a step that has begun: optimizer.load_state_dict() was called between "
    "backward and step. Call it before backward or after step"
)

ASSIGNED = (
    "gradients that no backward pass has made (assigned to .grad, as after torch.autograd.grad or torch.func.grad) "
    "travel uncompressed, and the optimizer keeps its momentum; call backward() on a loss to compress them"
)

REDUCED_AGAIN = (
    "gradients were reduced twice in a step, the second time uncompressed (as float32: more bytes than compression "
    "saved). optimizer.step() synchronizes by itself: after optimizer.synchronize(), write "
    "'with optimizer.skip_synchronize(): optimizer.step()'"
)

OVERWRITTEN = (
    "gradients were changed between backward and synchronize, and the means over all ranks replaced them: clipping or "
    "unscaling did not work. Call optimizer.synchronize() before clipping or unscaling, and afterwards "
    "'with optimizer.skip_synchronize(): optimizer.step()'"
)

THROWN_AWAY = (
    "gradients were synchronized, and backward has run again without optimizer.step(): if they were thrown away (a "
    "skipped step, a GAN's other network), what the level left of them in the residuals arrives with later gradients. "
    "Call quantizer.discard() before zero_grad(), or do not exchange them (docs/training.md)"
)

REWOUND = (
    "the loaded state is of epoch {}, but its controller is in epoch {}: load the controller's state, too "
    "(controller.load_state_dict), or levels begin anew"
)

SPARSE = (
    "gradients of {0} are sparse: Horovod reduces them as they are, and zeros travel compressed beside them; leave it "
    "out: DynamicQuantizer(..., skip=lambda name, parameter: name == {0!r})"
)

COPIES = (
    "no optimizer that less_momentum has made steps the parameters whose gradients are compressed, so they keep "
    "all momentum: give it the model's own parameters, not copies of them"
)


class Advice:
    """The warnings of one quantizer."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def warn(self, about: str, text: str) -> None:
        """Log `text` unless it is empty or a warning `about` the same was logged before."""
        if text and about not in self._said:
            self._said.add(about)
            logger.warning(text)
