"""A race in a folder: race.csv, and what follows from it."""
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ladder.records.recipes import Record, read_csv, standings

FILE = "race.csv"


@dataclass
class Race:
    record: Record

    @property
    def facts(self):
        """What the logs' headers have in common."""
        return self.record.facts

    @cached_property
    def table(self):
        """The standings, each script compared with the row before."""
        return standings(self.record, against_first=False)


def read_race(folder):
    """The Race in a folder; None without one, or before its first run has ended."""
    path = Path(folder) / FILE
    race = Race(read_csv(path)) if path.exists() else None
    return race if race and race.record.names else None
