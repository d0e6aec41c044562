"""Cards: found by a word, by the driver's name, by a run's folder."""
import json

import pytest

from ladder.count.cards import CARDS, card_of, find_card
from ladder.errors import UserError
from ladder.records.machine import measured_card


def test_a_card_by_the_word_that_tells_it_from_others():
    assert find_card("4090") is find_card("rtx 4090") is CARDS["RTX 4090"]
    with pytest.raises(UserError, match="no such card"):
        find_card("40")


def test_a_run_s_folder_is_a_card_with_the_rates_measured_in_it(tmp_path, call):
    rates = {"float32": 1e12, "tf32": 2e12, "bfloat16": 4e12}
    (tmp_path / "machine.json").write_text(json.dumps({"name": "mine", "rates": rates, "bytes_per_second": 1e12}))
    assert find_card("mine:1,2,4,1000").rate("tf32") == measured_card(tmp_path).rate("tf32") == 2e12
    assert measured_card(tmp_path).bandwidth == 1000
    code, output, _ = call("floor", "--gpu", tmp_path, "--rungs", "10")
    alone = call("floor", "--gpu", "mine:1,2,4,1000", "--rungs", "10")[1]
    assert code == 0 and output.partition("needs the most")[0] == alone.partition("needs the most")[0]


@pytest.mark.parametrize("device, name", [
    ("NVIDIA A100-SXM4-40GB", "A100"), ("NVIDIA A100-SXM4-80GB", "A100 80GB"), ("A100-SXM-80GB", "A100 80GB"),
    ("Tesla T4", "T4"), ("Tesla V100-SXM2-32GB", "V100"), ("NVIDIA GeForce RTX 3090", "RTX 3090"), ("T4", "T4"),
    ("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA B200", "B200"), ("NVIDIA L4", "L4"),
    # other products: some are faster than the card on the list
    ("NVIDIA GeForce RTX 3090 Ti", None), ("NVIDIA GeForce RTX 3080 Laptop GPU", None),
    ("NVIDIA GeForce RTX 4090 D", None), ("NVIDIA H100 PCIe", None),
    ("NVIDIA H100 NVL", None), ("NVIDIA H200 NVL", None), ("NVIDIA A100-PCIE-40GB", None),
    ("NVIDIA A100 80GB PCIe", None), ("NVIDIA A100-SXM-64GB", None), ("Tesla V100-PCIE-16GB", None),
    ("NVIDIA L40S", None), ("NVIDIA GH200 480GB", None), ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ("AMD EPYC", None), (None, None),
])
def test_cards_are_known_by_the_drivers_name(device, name):
    card = card_of(device)
    assert (card and card.name) == name
