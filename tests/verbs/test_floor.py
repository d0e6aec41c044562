"""python -m ladder floor: what it refuses."""
from run_tool import is_one_error


def test_two_cards_of_one_name_are_refused(call):
    """Else they would be one column, with the numbers of the second."""
    answer = call("floor", "--gpu", "mine:1,2,4,1000", "mine:2,4,8,1000")
    assert is_one_error(answer, "--gpu: two cards are called mine; ")
