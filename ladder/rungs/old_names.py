"""What the scripts of beyond/ were called when records and models were made: {file's name without suffix: label}.

Records and saved models keep these names. Nothing else is imported here: convert.py reads it, too.
"""
import re

OLD_NAMES = {
    "rung_11_gradient_accumulation": "gradient_accumulation",
    "rung_12_prefetch": "prefetch",
    "rung_13_validation": "distributed_validation",
    "rung_14_checkpoint_resume": "checkpoints",
    "rung_15_preemption": "preemption",
    "rung_16_gradient_checkpointing": "gradient_checkpointing",
    "rung_17_chunked_cross_entropy": "chunked_cross_entropy",
    "validation": "validation",
    "rung_18_muon": "muon",
    "rung_19_trapezoid_lr": "trapezoid_lr",
    "rung_20_rope": "rope",
    "rung_21_rmsnorm": "rmsnorm",
    "rung_22_qk_norm": "qk_norm",
    "rung_23_swiglu": "swiglu",
    "rung_24_zero_init": "zero_init",
    "rung_25_fp8": "fp8",
    "rung_26_shuffled_windows": "shuffled_windows",
    "rung_27_best_checkpoint": "best_checkpoint",
    "rung_28_dropout": "dropout",
    "rung_29_documents_apart": "documents_apart",
    "rung_30_frequency_prior": "frequency_prior",
    "rung_31_ngram_embeddings": "ngram_embeddings",
    "rung_32_grouped_query_attention": "grouped_query_attention",
    "rung_33_sharded_optimizer": "sharded_optimizer",
    "fsdp_run": "fsdp",
    "fsdp_sharded_checkpoint": "sharded_checkpoint",
    "rung_34_rates_that_carry_over": "mup",
    "rung_35_bf16_residual": "bf16_residual",
    "rung_36_cuda_graphs": "cuda_graphs",
    "rung_39_sampled_softmax": "sampled_softmax",
}
# The labels of then, from "11" to "39".
OLD_LABELS = {"dcp": "sharded_checkpoint"} | {
    number[1]: label for name, label in OLD_NAMES.items() if (number := re.match(r"rung_(\d+)_", name))}
