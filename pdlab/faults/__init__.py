"""What goes wrong between a prefill and a decode instance, produced on purpose: `lab.fault("eos_on_prefill")`."""

from pdlab.faults.faults import FAULTS as FAULTS
from pdlab.faults.faults import produce as produce
from pdlab.faults.faults import stored as stored
from pdlab.faults.outcome import Outcome as Outcome
from pdlab.faults.table import Table as Table
