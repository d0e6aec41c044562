"""The FLOPs of a token, against PaLM's formula."""
from ladder.count.flops import flops_per_token


def test_flops_in_closed_form():
    """PaLM's formula on GPT-2's published shapes."""
    n_matrix = 50257 * 768 + 12 * (768 * 2304 + 768 * 768 + 2 * 768 * 3072)
    assert flops_per_token("gpt2", 1024) == 6 * n_matrix + 12 * 12 * 768 * 1024
    assert flops_per_token("gpt2", 1024, causal=True) == 6 * n_matrix + 6 * 12 * 768 * 1024
    assert flops_per_token("4x4x128", 64, vocab_size=257) == 6 * (257 * 128 + 4 * 12 * 128**2) + 12 * 4 * 128 * 64
