"""Whether a machine can run a model, how fast, and what to type next."""

from k3rs.doctor.checks import Check, Status
from k3rs.doctor.examination import Probe, Report, examine

__all__ = ["Check", "Probe", "Report", "Status", "examine"]
