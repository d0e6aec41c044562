"""`python -m ladder propagate`: carry the uncommitted fix in a rung through all later rungs, as far as it goes."""
from ladder.errors import UserError
from ladder.rungs.carry import propagate
from ladder.rungs.list import find_rung


def add_flags(parser):
    parser.add_argument("rung", metavar="RUNG", help="file or label of the script with the fix")


def main(args, console):
    rung = find_rung(args.rung)
    written, stops = propagate(rung)
    console.print(f"the fix in {rung.file} is now in {len(written)} later rungs:")
    for file in written:
        console.print(f"  {file}")
    if stops:
        raise UserError("\n".join(stops))
