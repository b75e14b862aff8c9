"""Errors and warnings about the use of a quantizer, in words."""

ANOTHER_OPTIMIZER = (
    "a DynamicQuantizer serves one optimizer, and this quantizer already serves another one; create one "
    "DynamicQuantizer per optimizer (they may share a controller). To replace the other optimizer, delete it and call "
    "gc.collect(): as long as it exists, Horovod reduces its gradients"
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
    "Horovod has lost the gradients of a step in progress, because optimizer.load_state_dict() was called between "
    "backward() and optimizer.step(); call load_state_dict() before backward() or after optimizer.step()"
)

GROUPS = (
    "groups= of hvd.DistributedOptimizer has no use below 32 bits, where gradients are exchanged in buckets of "
    "bucket_bytes; leave it out"
)

REDUCED_AGAIN = (
    "gradients were reduced twice in a step, the second time uncompressed (as float32: more bytes than compression "
    "saved). optimizer.step() synchronizes by itself: after optimizer.synchronize(), write "
    "'with optimizer.skip_synchronize(): optimizer.step()'"
)

REWOUND = (
    "the loaded quantizer state is from epoch {}, but the controller is in epoch {}: also load the controller's state "
    "with controller.load_state_dict; otherwise the levels start again from that earlier epoch"
)

SPARSE = (
    "gradients of {0} are sparse: Horovod reduces them as they are, and the quantizer also sends compressed zeros for "
    "them; skip this parameter: DynamicQuantizer(..., skip=lambda name, parameter: name == {0!r})"
)


# Arguments of quantizers that there are no longer, and what to do instead.
GONE = {
    "auto_level": "pass the policy LinkAware, which moves the level after an epoch by the time that was spent waiting "
    "for exchanges, or a level that 'python -m hvd_dyncomp probe' finds fast",
    "discardable": "leave it out: an exchange cannot be taken back ('Discard a step' in docs/training.md)",
    "rounding": "leave it out: values are rounded to nearest, and error feedback delivers what that loses",
    "fp16_skipped": "leave it out: skipped parameters are sent in their own dtype",
}
