"""`python -m ladder check`: what this machine has, and what each rung will gain from it."""
from ladder.measure.machine_check import BAD, GOOD, NEUTRAL, check_machine

COLORS = {GOOD: "green", NEUTRAL: "yellow", BAD: "red"}


def add_flags(parser):
    """It has none."""


def main(args, console):
    findings, command = check_machine()
    for mark, what, detail in findings:
        console.print(f"{mark} {what}: {detail}", style=COLORS[mark])
    console.print(f"\nFor this machine:\n    {command}")
