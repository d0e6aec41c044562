"""`python -m ladder check`: what this machine has, and what each rung will gain from it."""
from ladder.measure.machine_check import BAD, GOOD, NEUTRAL, check_machine
from ladder.measure.script_flags import defaults
from ladder.rungs.list import BY_LABEL

COLORS = {GOOD: "green", NEUTRAL: "yellow", BAD: "red"}


def add_flags(parser):
    """It has none."""


def main(args, console):
    device = defaults(BY_LABEL["10"])["device"]
    findings, command = check_machine(device)
    for mark, what, detail in findings:
        console.print(f"{mark} {what}: {detail}", style=COLORS[mark])
    console.print(f"\nFor this machine:\n    {command}")
    console.print("To test every script here, after pip install -r requirements-dev.txt:\n"
                  f"    python -m pytest --device {device} tests/scripts/test_smoke.py", soft_wrap=True)
