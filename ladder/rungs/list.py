"""The one list of rungs: file, title, the rung it starts from, the definitions it may change, and other facts.

The tests enforce it, and everything that shows the ladder reads it. A definition is a function, a class, or a method
("GPT.forward"), by name; "imports" stands for the import statements. The module docstring may always change. Below the
banner all scripts are byte-identical.
"""
import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
BANNER = "# ---- the same in every rung"  # begins the line between a script's lesson and its plumbing
RUNGS, BY_LABEL = [], {}  # filled below


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder."""

    label: str  # what the rung is called on the command line: "0" to "10", "ddp", "11" and up, "long_run", "fsdp"
    file: str  # relative to the repository's root
    title: str
    before: str | tuple | None = None  # the label of the rung it starts from; of long_run those of both
    may_change: frozenset = frozenset()  # of long_run: what is neither's
    same_losses: float | None = None  # nats: how close its losses stay to the rung before; None: it changes them
    lecture_ms: int | None = None  # a step of Karpathy's lecture with it: one A100, B=16, T=1024 (docs/teaching.md)
    torchrun: bool = False  # whether `python -m ladder run` starts it on several ranks
    # From here on, what a rung does not set is as in the (last) rung it starts from.
    tied: bool = False  # one matrix is both embedding and output layer
    causal: bool = False  # attention computes no scores above the diagonal
    memory: tuple = (64, 12, 4)  # bytes of a vector entry, a logit and a score: see memory.py
    chunked: bool = False  # the logits of a whole batch never exist at once
    exports_to: str | None = "gpt2"  # transformers' model type, None where it has no such model

    @property
    def starts(self):
        """The rungs that it starts from: one, but none for the baseline, and two for long_run."""
        if self.before is None:
            return ()
        return tuple(BY_LABEL[label] for label in ([self.before] if isinstance(self.before, str) else self.before))

    @property
    def start(self):
        """The rung that it is compared with: the first that it starts from, None for the baseline."""
        return self.starts[0] if self.starts else None

    @property
    def path(self):
        return ROOT / self.file

    @property
    def name(self):
        """The file's name without its suffix: also the name of its log."""
        return self.path.stem


def add(label, file, title, before=None, *may_change, **facts):
    """Add a rung to the list."""
    rung = Rung(label, file, title, before, frozenset(may_change), **facts)
    if before:
        inherited = ("tied", "causal", "memory", "chunked", "exports_to")
        rung = replace(rung, **{name: getattr(rung.starts[-1], name) for name in inherited} | facts)
    BY_LABEL[label] = rung
    RUNGS.append(rung)


def load_script(rung):
    """A rung's script as a module."""
    spec = importlib.util.spec_from_file_location(rung.name, rung.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


add("0", "baseline.py", "baseline", lecture_ms=1000)
add("1", "speedup_01_weight_tying.py", "weight tying", "0", "GPTConfig", "GPT.__init__", tied=True)
# How close losses stay when a rung changes only how the arithmetic is done: TF32 and bfloat16 round each activation to
# 10 and 7 bits, compile and flash attention round in different places, and training amplifies such differences.
add("2", "speedup_02_tf32.py", "TF32", "1", "train", same_losses=0.05, lecture_ms=333)
add("3", "speedup_03_bf16_autocast.py", "bfloat16 autocast", "2",
    "GPT.forward", "PRECISION", "autocast_dtype", "train", same_losses=0.1, memory=(36, 12, 6), lecture_ms=300)
add("4", "speedup_04_residual_scaling.py", "residual scaling", "3",
    "CausalSelfAttention.__init__", "MLP.__init__", "GPT._init_weights")
add("5", "speedup_05_compile.py", "torch.compile", "4", "add_flags", "check_compiler", "train",
     same_losses=0.1, memory=(36, 4, 4), lecture_ms=130)
add("6", "speedup_06_flash_attn.py", "flash attention", "5",
    "CausalSelfAttention.__init__", "CausalSelfAttention.forward",
     same_losses=0.1, causal=True, memory=(36, 4, 0), lecture_ms=96)
add("7", "speedup_07_vocab_pad.py", "vocabulary padding", "6", "GPT.__init__", "GPT.forward", lecture_ms=93)
add("8", "speedup_08_adamw_clip.py", "AdamW betas, gradient clipping", "7", "train")
add("9", "speedup_09_cosine_lr.py", "cosine learning rate", "8", "add_flags", "get_lr", "train")
add("10", "speedup_10_fused_adamw.py", "fused AdamW, selective decay", "9", "GPT.configure_optimizers", "train",
     lecture_ms=90)
LADDER = list(RUNGS)  # up to here each rung makes a step faster or the loss fall faster, on one device
add("ddp", "ddp_run.py", "DistributedDataParallel", "10",
    "imports", "add_flags", "init_ranks", "train", torchrun=True)
# A long run: any number of ranks, batches of any size, through crashes, in little memory.
add("11", "beyond/long_run/rung_11_gradient_accumulation.py", "gradient accumulation", "ddp",
    "add_flags", "batches_per_step", "optimizer_step", "train")
add("12", "beyond/long_run/rung_12_prefetch.py", "prefetch", "11",
    "DataLoaderLite", "optimizer_step", "train", same_losses=0.01)
add("13", "beyond/long_run/rung_13_validation.py", "validation", "12",
    "add_flags", "DataLoaderLite", "evaluate", "train", same_losses=0.01)
add("14", "beyond/long_run/rung_14_checkpoint_resume.py", "checkpoint and resume", "13",
    "imports", "add_flags", "MAY_CHANGE", "Checkpoints", "train", same_losses=0.01)
add("15", "beyond/long_run/rung_15_preemption.py", "preemption", "14",
    "imports", "on_any_rank", "catch_signals", "train", same_losses=0.01)
add("16", "beyond/long_run/rung_16_gradient_checkpointing.py", "gradient checkpointing", "15",
    "imports", "add_flags", "MAY_CHANGE", "GPT.__init__", "GPT.forward", "train", same_losses=0.1)
add("17", "beyond/long_run/rung_17_chunked_cross_entropy.py", "chunked cross-entropy", "16",
    "add_flags", "MAY_CHANGE", "ChunkedCrossEntropy", "GPT.__init__", "GPT.forward", "train",
     same_losses=0.1, chunked=True)
# From GPT-2 to a modern transformer: fewer tokens to the same loss. One process, one batch a step.
add("validation", "beyond/modern/validation.py", "a validation loss", "10",
    "add_flags", "DataLoaderLite", "evaluate", "train", same_losses=0.01)
add("18", "beyond/modern/rung_18_muon.py", "Muon", "validation",
    "add_flags", "GPT.configure_optimizers", "orthogonalize", "muon_update", "MuonAdamW",
    "set_learning_rates", "train")
add("19", "beyond/modern/rung_19_trapezoid_lr.py", "trapezoid learning rate", "18",
    "add_flags", "get_lr", "set_learning_rates")
add("20", "beyond/modern/rung_20_rope.py", "RoPE", "19",
    "model_config", "rotary_angles", "rotate", "CausalSelfAttention.forward", "Block.forward", "GPT", exports_to=None)
add("21", "beyond/modern/rung_21_rmsnorm.py", "RMSNorm, no biases", "20",
    "CausalSelfAttention.__init__", "MLP.__init__", "Block.__init__", "GPT")
add("22", "beyond/modern/rung_22_qk_norm.py", "QK-norm", "21",
    "CausalSelfAttention.__init__", "CausalSelfAttention.forward", "GPT")
add("23", "beyond/modern/rung_23_swiglu.py", "SwiGLU", "22", "GPTConfig", "MLP", "GPT",
     exports_to="qwen3")
add("24", "beyond/modern/rung_24_zero_init.py", "zero-initialized projections", "23", "GPT._init_weights")
# Larger models.
add("25", "beyond/modern/rung_25_fp8.py", "FP8", "24", "add_flags", "to_float8", "float8_product",
    "Float8Product", "Float8Linear", "use_float8", "CausalSelfAttention.__init__", "MLP.__init__", "train")
# A model worth keeping from a small text.
add("26", "beyond/small_text/rung_26_shuffled_windows.py", "shuffled windows", "24", "DataLoaderLite", "train")
add("27", "beyond/small_text/rung_27_best_checkpoint.py", "best checkpoint", "26",
    "add_flags", "Best", "train", same_losses=0.01)
add("28", "beyond/small_text/rung_28_dropout.py", "dropout", "27",
    "add_flags", "Block.__init__", "Block.forward", "GPT.__init__", "GPT.forward", "train")
add("29", "beyond/small_text/rung_29_documents_apart.py", "documents apart", "28",
    "document_mask", "CausalSelfAttention", "Block.forward", "GPT.__init__", "GPT.forward", "train")
# Past Qwen3: fewer tokens to the same loss.
add("30", "beyond/modern/rung_30_frequency_prior.py", "frequency prior", "24",
    "GPT", "count_log_frequencies", "train", exports_to=None)
add("31", "beyond/modern/rung_31_ngram_embeddings.py", "hashed n-gram embeddings", "30",
    "GPTConfig", "GPT.__init__", "GPT.forward", "GPT.configure_optimizers")
# Both trunks in one.
add("long_run", "beyond/long_run/long_run.py", "a modern model, a long run", ("17", "24"),
    "imports", "add_flags", "GPT.__init__", "GPT.forward", "Checkpoints.refuse_other_run", "last_step_at_max_lr",
    "train", chunked=True)
# The shape of published models.
add("32", "beyond/long_run/rung_32_grouped_query_attention.py", "grouped-query attention", "long_run",
    "add_flags", "GPTConfig", "model_config", "CausalSelfAttention", "GPT.__init__")
# Several cards.
add("33", "beyond/several_cards/rung_33_sharded_optimizer.py", "sharded optimizer", "long_run",
    "GPT.configure_optimizers", "MuonAdamW.step", "ShardedMuonAdamW", "Checkpoints.save", "init_ranks", "train",
     same_losses=0.01, torchrun=True)
add("fsdp", "beyond/several_cards/fsdp_run.py", "FSDP", "long_run",
    "imports", "GPT.__init__", "GPT.forward", "orthogonalize", "evaluate", "Checkpoints.load", "Checkpoints.save",
    "shard", "gather", "compile_parts", "optimizer_step", "train", torchrun=True)
add("dcp", "beyond/several_cards/fsdp_sharded_checkpoint.py", "sharded checkpoint", "fsdp",
    "imports", "Checkpoints", same_losses=0.01, torchrun=True)
# Learning rates for larger models.
add("34", "beyond/modern/rung_34_rates_that_carry_over.py", "rates that carry over", "24",
    "BASE_WIDTH", "GPT.__init__", "GPT.forward", "muon_update")
# A small model's vocabulary.
add("39", "beyond/modern/rung_39_sampled_softmax.py", "sampled softmax", "24",
    "EXTRA_ROWS", "GPT.forward", "GPT.sampled_loss")
# The last milliseconds on one GPU: from rung 10.
add("35", "beyond/gpu/rung_35_bf16_residual.py", "bfloat16 residual stream", "10",
    "GPT.forward", same_losses=0.1, memory=(32, 4, 0))
add("36", "beyond/gpu/rung_36_cuda_graphs.py", "CUDA graphs", "35",
    "imports", "add_flags", "GPT.configure_optimizers", "optimizer_step", "has_graphs", "GraphedStep", "train",
     same_losses=0.01)

BY_NAME = {rung.name: rung for rung in RUNGS}
NUMBERS = [label for label in BY_LABEL if label.isdigit()]
CHOICE = f"0 to {max(NUMBERS, key=int)}, {', '.join(label for label in BY_LABEL if label not in NUMBERS)}"


def parse_rungs(text):
    """The rungs of "0-2,ddp", without duplicates; raises UserError for anything that is not a rung."""
    labels, rungs = list(BY_LABEL), []
    for part in text.replace(" ", "").split(","):
        ends = part.split("-")
        places = [labels.index(label) for label in ends if label in labels]
        if len(places) != len(ends) or len(ends) > 2 or places[0] > places[-1]:
            raise UserError(f"--rungs {text}: not rungs; write for example 0-10 or 0,5,ddp, of {CHOICE}")
        rungs += RUNGS[places[0] : places[-1] + 1]
    return list(dict.fromkeys(rungs))


def find_rung(word):
    """The rung called "7", "07" or "ddp", or by its file's name."""
    rung = BY_LABEL.get(word.lstrip("0") or "0") or BY_NAME.get(Path(word).stem)
    if rung is None:
        raise UserError(f"no rung {word}: write one of {CHOICE}, or its file's name")
    return rung
