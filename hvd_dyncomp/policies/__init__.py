"""Which level comes next. `base` holds the contract; every other file is one kind of policy."""

from hvd_dyncomp.policies.base import Decision, Policy, Record
from hvd_dyncomp.policies.fixed import Schedule, Static
from hvd_dyncomp.policies.step_function import StepFunction

__all__ = ["Decision", "Policy", "Record", "Schedule", "Static", "StepFunction"]
