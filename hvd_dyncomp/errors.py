"""The package's own exceptions."""


class ControllerError(RuntimeError):
    """`Controller.step` has no decision: the policy failed on rank 0, or the metrics of some rank are unusable.

    Raised on every rank in the same call.
    """


class LockstepError(RuntimeError):
    """The ranks differ in something that must be the same on all of them, or another rank gave up; the message says so.

    Raised on every rank in the same call, except on a rank that has an error of its own, which raises its own error.
    """


class InFlight(RuntimeError):
    """Gradients are in flight: a call that must come between steps has come within one."""


class HorovodMissing(ImportError):
    """Horovod is not installed, or was built without torch."""


# Why a rank is missing; part of every message about it.
JOINED = (
    "it has called hvd.join(), which Horovod supports for its own allreduces only; give every rank the same number of "
    "steps, as DistributedSampler does, or train without DynamicQuantizer"
)
