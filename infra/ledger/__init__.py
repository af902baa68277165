"""Ledger of the devices' time: the record that each attempt writes as it goes, and the account that is read from it.

record.py     writes <work folder>/times.jsonl; each line is flushed, so that SIGKILL loses half a second at most
account.py    device-seconds by kind and cause, and what they cost
attempts.py   reads a record: each second of an attempt under one kind and cause
energy.py     power, prices and emissions: measured where the driver reports them, otherwise documented estimates
builds.py     the cost of an artifact, from the record in its aux/
ancestors.py  that of all that it descends from
"""

from infra.ledger.account import Account, Recovery
from infra.ledger.attempts import BuildTimes, read_times
from infra.ledger.record import TIMES, TimeRecord

__all__ = ["TIMES", "Account", "BuildTimes", "Recovery", "TimeRecord", "read_times"]
