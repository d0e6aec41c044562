"""A race as race.json has it: what its logs have in common, and its standings."""
from dataclasses import dataclass
from pathlib import Path

from ladder.records.logs import stage_of
from ladder.records.machine import read_json
from ladder.rungs.list import today

FILE = "race.json"


@dataclass
class Racer:
    """A rung in the standings; triples are (median, lowest, highest) over the seeds, inf where a run got nowhere.

    Of the losses, which are tested, the mean.
    """

    name: str
    rates: list  # AdamW's learning rate, and Muon's if it has Muon
    val_loss: list
    tokens: list  # to the target
    seconds: list  # to the target
    percent: list  # those seconds as a share of the first rung's median
    ms: float  # of a step
    parameters: float
    change: list | None  # of the loss from the rung before: the mean over the seeds, its 95 % interval
    p_loss: float | None  # of that mean, Holm's over the race; None where it was not tested
    significant: bool
    steps: list  # of the validations
    losses: list  # of the validations, the means over the seeds

    @property
    def label(self):
        return stage_of(self.name).label

    @property
    def title(self):
        return stage_of(self.name).title

    @property
    def called(self):
        """What a sentence calls it."""
        return stage_of(self.name).called


@dataclass
class Race:
    """A race: what the logs' headers have in common, and its standings."""

    facts: dict
    target: float  # a validation loss, nats
    caption: str
    rows: list  # for each rung the values of a report.Row that are known
    racers: list


def read_race(folder):
    """The Race in a folder; None without one."""
    race = read_json(Path(folder) / FILE, dict, "run python -m experiments.race again")
    if not race:
        return None
    rows, racers = ([row | {"name": today(row["name"])} for row in race[key]] for key in ("rows", "racers"))
    return Race(**race | {"rows": rows, "racers": [Racer(**racer) for racer in racers]})
