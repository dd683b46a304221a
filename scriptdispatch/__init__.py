"""scriptdispatch: runs scripts on fleets of devices, one at a time per device, nothing lost, nothing twice."""

__version__ = "0.1.0"
