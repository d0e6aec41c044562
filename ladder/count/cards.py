"""GPUs by their datasheets: dense matrix-product rates with float32 accumulation, and memory bandwidth.

Rates "with sparsity" are twice the dense ones. With float32 accumulation, which PyTorch uses, consumer cards multiply
16-bit numbers at half of their datasheet's headline rate. They also clock higher than their datasheet says: an RTX 5090
has been measured at 254 TFLOP/s in bfloat16, 1.21 times its datasheet (github.com/xzwgit/gpu-flops-bench).
"""
import re
from dataclasses import dataclass

from ladder.errors import UserError


@dataclass(frozen=True)
class Card:
    """Rates in TFLOP/s, bandwidth in GB/s; without TF32 (before Ampere), `tf32` is the float32 rate."""

    name: str
    float32: float
    tf32: float
    bits16: float  # float16 and bfloat16
    bandwidth: float
    source: str

    def rate(self, number_format):
        """FLOP/s in a number format: "float32", "tf32"; all others have 16 bits."""
        return 1e12 * {"float32": self.float32, "tf32": self.tf32}.get(number_format, self.bits16)


A100 = "NVIDIA A100 datasheet and Ampere architecture whitepaper, SXM"
CARDS = {card.name: card for card in (
    Card("T4", 8.1, 8.1, 65, 320, "NVIDIA T4 datasheet"),
    Card("V100", 15.7, 15.7, 125, 900, "NVIDIA V100 datasheet and Volta whitepaper, SXM2"),
    Card("RTX 3080", 29.8, 29.8, 59.5, 760, "NVIDIA Ampere GA102 whitepaper, 10 GB"),
    Card("RTX 3090", 35.6, 35.6, 71, 936, "NVIDIA Ampere GA102 whitepaper"),
    Card("RTX 4090", 82.6, 82.6, 165.2, 1008, "NVIDIA Ada whitepaper, appendix A"),
    Card("RTX 5090", 104.8, 104.8, 209.5, 1792, "NVIDIA RTX Blackwell whitepaper"),
    Card("L4", 30.3, 60, 121, 300, "NVIDIA L4 datasheet, halved"),
    Card("A100", 19.5, 156, 312, 1555, f"{A100}, 40 GB"),
    Card("A100 80GB", 19.5, 156, 312, 2039, f"{A100}, 80 GB"),
    Card("H100", 67, 494.7, 989.4, 3350, "NVIDIA H100 datasheet, SXM, halved"),
    Card("H200", 67, 494.7, 989.4, 4800, "NVIDIA H200 datasheet, SXM, halved"),
    Card("B200", 80, 1125, 2250, 8000, "NVIDIA Blackwell architecture brief, HGX B200 at 1,000 W, halved"),
)}
# Which the driver adds to the names of just these products; any other word tells of a different one.
USUAL_WORDS = {"NVIDIA", "Tesla", "GeForce", "SXM", "SXM2", "SXM4", "HBM3", "16GB", "32GB", "40GB", "80GB"}


def find_card(text):
    """The card called `text` ("RTX 4090", "rtx4090", "4090"), or given by its numbers as NAME:FLOAT32,TF32,16BIT,GB/s.

    UserError for anything else.
    """
    by_name = {name.lower().replace(" ", ""): card for name, card in CARDS.items()}
    by_name |= {name.removeprefix("rtx"): card for name, card in by_name.items()}
    name, colon, numbers = text.partition(":")
    if not colon and text.lower().replace(" ", "") in by_name:
        return by_name[text.lower().replace(" ", "")]
    try:
        rates = [float(number) for number in numbers.split(",")]
        if len(rates) != 4 or not all(0 < rate < 1e9 for rate in rates):
            raise ValueError
    except ValueError:
        raise UserError(f"--gpu {text}: no such card; give one of {', '.join(CARDS)}, or NAME:FLOAT32,TF32,16BIT,GB "
                        "in TFLOP/s and GB/s, such as mine:19.5,156,312,1555") from None
    return Card(name, *rates, "given on the command line")


def card_of(device):
    """The card that a log's device ("NVIDIA A100-SXM4-40GB") names, or None: "3090 Ti" or "H100 PCIe" are others."""
    words = set(re.findall(r"\w+", device or ""))
    found = [card for name, card in CARDS.items() if set(name.split()) <= words <= USUAL_WORDS.union(name.split())]
    return max(found, key=lambda card: len(card.name.split()), default=None)
