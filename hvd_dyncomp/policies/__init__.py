"""Policies: which level comes next. `base` has the contract, `arguments` shared checks; other files are policies."""

from hvd_dyncomp.policies.base import Decision, Policy, Record
from hvd_dyncomp.policies.critical_regime import CriticalRegime
from hvd_dyncomp.policies.fixed import Schedule, Static
from hvd_dyncomp.policies.link_aware import LinkAware
from hvd_dyncomp.policies.plateau import Plateau
from hvd_dyncomp.policies.step_function import StepFunction

__all__ = [
    "CriticalRegime",
    "Decision",
    "LinkAware",
    "Plateau",
    "Policy",
    "Record",
    "Schedule",
    "Static",
    "StepFunction",
]
