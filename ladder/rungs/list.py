"""The one list of rungs: file, title, the rung it starts from, the definitions it may change, and other facts.

The tests enforce it, and everything that shows the ladder reads it. A definition is a function, a class, or a method
("GPT.forward"), by name; "imports" stands for the import statements. The module docstring may always change. Below the
banner all scripts are byte-identical.
"""
import difflib
import importlib.util
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from ladder.errors import UserError
from ladder.rungs.old_names import OLD_LABELS, OLD_NAMES

ROOT = Path(__file__).resolve().parents[2]
BANNER = "# ---- the same in every rung"  # begins the line between a script's lesson and its plumbing
RUNGS, BY_LABEL = [], {}  # filled below


@dataclass(frozen=True)
class Rung:
    """One rung of the ladder; without a label, any other script."""

    label: str  # what it is called on the command line: "0" to "10", "ddp"; in beyond/ its file's name without number
    file: str  # relative to the repository's root
    title: str
    before: str | tuple | None = None  # the label of the rung it starts from; of long_run those of both
    may_change: frozenset = frozenset()  # of long_run: what is neither's
    same_losses: float | None = None  # nats: how close its losses stay to the rung before; None: it changes them
    lecture_ms: int | None = None  # a step of Karpathy's lecture with it: one A100, B=16, T=1024 (docs/teaching.md)
    brings: str = ""  # what it is good for, in a few words: of the scripts in beyond/
    torchrun: bool = False  # whether `python -m ladder run` starts it on several ranks
    about_compiling: bool = False  # whether its exercise is to compile
    has_mfu: bool = True  # whether --model alone tells its matrix products
    has_floor: bool = True  # whether its step's kernels are counted: not if the cards' rates lack its number format
    # From here on, what a rung does not set is as in the (last) rung it starts from.
    tied: bool = False  # one matrix is both embedding and output layer
    causal: bool = False  # attention computes no scores above the diagonal
    memory: tuple = (64, 12, 4)  # bytes of a vector entry, a logit and a score: see memory.py
    scheduled: bool = False  # its learning rate depends on --steps
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
    def called(self):
        """What a sentence calls it: "rung 6", or by its label alone, or by its title where it has none."""
        return f"rung {self.label}" if self.label.isdigit() else self.label or self.title

    @property
    def row(self):
        """What a row of a table calls it: "6 flash attention", "muon", and by the title what is no rung."""
        return self.label if self.track else f"{self.label} {self.title}".strip()

    @property
    def track(self):
        """The folder of beyond/ that it lies in; "" for the others."""
        return self.path.parent.name if self.file.startswith("beyond/") else ""

    @property
    def path(self):
        return ROOT / self.file

    @property
    def name(self):
        """The file's name without its suffix: also the name of its log."""
        return self.path.stem


def add(label, file, title, before=None, may_change="", **facts):
    """Add a rung to the list; `may_change` names definitions, with blanks between them."""
    rung = Rung(label, file, title, before, frozenset(may_change.split()), **facts)
    if before:
        inherited = ("tied", "causal", "memory", "scheduled", "chunked", "exports_to")
        rung = replace(rung, **{name: getattr(rung.starts[-1], name) for name in inherited} | facts)
    BY_LABEL[label] = rung
    RUNGS.append(rung)


def load_script(rung):
    spec = importlib.util.spec_from_file_location(rung.name, rung.path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


add("0", "baseline.py", "baseline", lecture_ms=1000)
add("1", "speedup_01_weight_tying.py", "weight tying", before="0",
    may_change="GPTConfig GPT.__init__", tied=True)
# How close losses stay when a rung changes only how the arithmetic is done: TF32 and bfloat16 round each activation to
# 10 and 7 bits, compile and flash attention round in different places, and training amplifies such differences.
add("2", "speedup_02_tf32.py", "TF32", before="1",
    may_change="train", same_losses=0.05, lecture_ms=333)
add("3", "speedup_03_bf16_autocast.py", "bfloat16 autocast", before="2",
    may_change="GPT.forward PRECISION autocast_dtype train", same_losses=0.1, memory=(36, 12, 6), lecture_ms=300)
add("4", "speedup_04_residual_scaling.py", "residual scaling", before="3",
    may_change="CausalSelfAttention.__init__ MLP.__init__ GPT._init_weights")
add("5", "speedup_05_compile.py", "torch.compile", before="4",
    may_change="add_flags check_compiler train",
    about_compiling=True, same_losses=0.1, memory=(36, 4, 4), lecture_ms=130)
add("6", "speedup_06_flash_attn.py", "flash attention", before="5",
    may_change="CausalSelfAttention.__init__ CausalSelfAttention.forward",
    same_losses=0.1, causal=True, memory=(36, 4, 0), lecture_ms=96)
add("7", "speedup_07_vocab_pad.py", "vocabulary padding", before="6",
    may_change="GPT.__init__ GPT.forward", lecture_ms=93)
add("8", "speedup_08_adamw_clip.py", "AdamW betas, gradient clipping", before="7",
    may_change="train")
add("9", "speedup_09_cosine_lr.py", "cosine learning rate", before="8",
    may_change="add_flags get_lr train", scheduled=True)
add("10", "speedup_10_fused_adamw.py", "fused AdamW, selective decay", before="9",
    may_change="GPT.configure_optimizers train", lecture_ms=90)
LADDER = list(RUNGS)  # up to here each rung makes a step faster or the loss fall faster, on one device
add("ddp", "ddp_run.py", "DistributedDataParallel", before="10",
    may_change="imports add_flags init_ranks train", torchrun=True)
# From GPT-2 to a modern transformer: fewer tokens to the same loss. One process, one batch a step.
add("validation", "beyond/modern/0_validation.py", "a validation loss", before="10",
    may_change="add_flags DataLoaderLite evaluate train",
    same_losses=0.01, brings="measures the loss on held-out text, in one process")
add("muon", "beyond/modern/1_muon.py", "Muon", before="validation",
    may_change="add_flags GPT.configure_optimizers orthogonalize muon_update MuonAdamW set_learning_rates train",
    brings="orthogonalizes the updates of the blocks' matrices, which lowers the loss a lot")
add("trapezoid_lr", "beyond/modern/2_trapezoid_lr.py", "trapezoid learning rate", before="muon",
    may_change="add_flags get_lr set_learning_rates",
    brings="holds the learning rate, then lowers it linearly, so you need not fix a run's length in advance")
add("rope", "beyond/modern/3_rope.py", "RoPE", before="trapezoid_lr",
    may_change="model_config rotary_angles rotate CausalSelfAttention.forward Block.forward GPT",
    exports_to=None, brings="rotates queries and keys by position instead of adding position embeddings")
add("rmsnorm", "beyond/modern/4_rmsnorm.py", "RMSNorm, no biases", before="rope",
    may_change="CausalSelfAttention.__init__ MLP.__init__ Block.__init__ GPT",
    brings="replaces LayerNorm with RMSNorm and drops the biases")
add("qk_norm", "beyond/modern/5_qk_norm.py", "QK-norm", before="rmsnorm",
    may_change="CausalSelfAttention.__init__ CausalSelfAttention.forward GPT",
    brings="normalizes queries and keys, which bounds attention scores and lowers the loss")
add("swiglu", "beyond/modern/6_swiglu.py", "SwiGLU", before="qk_norm",
    may_change="GPTConfig MLP GPT",
    exports_to="qwen3", brings="adds a gate to the MLP, as in Qwen3")
add("zero_init", "beyond/modern/7_zero_init.py", "zero-initialized projections", before="swiglu",
    may_change="GPT._init_weights",
    brings="initializes the last layer of each residual branch to zero")
# What starts from the modern model: larger models, past Qwen3, a wide model's rates, a small model's vocabulary.
add("fp8", "beyond/modern/fp8.py", "FP8", before="zero_init",
    may_change="add_flags to_float8 float8_product Float8Product Float8Linear use_float8 CausalSelfAttention.__init__ "
               "MLP.__init__ train",
    has_floor=False,
    brings="computes the blocks' matrix products in 8 bits, on Ada, Hopper and newer GPUs (not timed)")
add("frequency_prior", "beyond/modern/frequency_prior.py", "frequency prior", before="zero_init",
    may_change="GPT count_log_frequencies train",
    exports_to=None, brings="starts the logits at the tokens' log-frequencies, which may give a faster start")
add("ngram_embeddings", "beyond/modern/ngram_embeddings.py", "hashed n-gram embeddings", before="frequency_prior",
    may_change="GPTConfig GPT.__init__ GPT.forward GPT.configure_optimizers",
    brings="adds embeddings of the last two and three tokens, which may lower the loss on byte tokens")
add("mup", "beyond/modern/mup.py", "muP", before="zero_init",
    may_change="BASE_WIDTH GPT.__init__ GPT.forward muon_update",
    brings="scales logits and Muon's updates with the width, so a narrow model's learning rates may suit a wide one")
add("sampled_softmax", "beyond/modern/sampled_softmax.py", "sampled softmax", before="zero_init",
    may_change="EXTRA_ROWS GPT.forward GPT.sampled_loss",
    brings="computes only a sample of the logits, so a small model reaches a lower loss in the same time")
# A model worth keeping from a small text.
add("shuffled_windows", "beyond/small_text/1_shuffled_windows.py", "shuffled windows", before="zero_init",
    may_change="DataLoaderLite train",
    brings="reads the text in a new order each epoch, which may lower the loss")
add("best_checkpoint", "beyond/small_text/2_best_checkpoint.py", "best checkpoint", before="shuffled_windows",
    may_change="add_flags Best train",
    same_losses=0.01, brings="keeps the model with the lowest validation loss")
add("dropout", "beyond/small_text/3_dropout.py", "dropout", before="best_checkpoint",
    may_change="add_flags Block.__init__ Block.forward GPT.__init__ GPT.forward train",
    brings="zeroes a tenth of the activations, which may help if a text is read often")
add("documents_apart", "beyond/small_text/4_documents_apart.py", "documents apart", before="dropout",
    may_change="document_mask CausalSelfAttention Block.forward GPT.__init__ GPT.forward train",
    brings="lets each token attend only to its own document")
# A long run: any number of ranks, batches of any size, through crashes, in little memory.
add("gradient_accumulation", "beyond/long_run/1_gradient_accumulation.py", "gradient accumulation", before="ddp",
    may_change="add_flags batches_per_step optimizer_step train",
    brings="sums the gradients of micro-batches, so a large batch needs no more memory than a small one")
add("prefetch", "beyond/long_run/2_prefetch.py", "prefetch", before="gradient_accumulation",
    may_change="DataLoaderLite optimizer_step train",
    same_losses=0.01, brings="loads the next batch while the device works, so only the first step waits for data")
add("distributed_validation", "beyond/long_run/3_distributed_validation.py", "validation", before="prefetch",
    may_change="add_flags DataLoaderLite evaluate train",
    same_losses=0.01, brings="measures the loss on held-out text, using all ranks")
add("checkpoints", "beyond/long_run/4_checkpoints.py", "checkpoint and resume", before="distributed_validation",
    may_change="add_flags MAY_CHANGE Checkpoints train",
    same_losses=0.01,
    brings="saves a run's whole state, so a crash costs only the steps since the last checkpoint")
add("preemption", "beyond/long_run/5_preemption.py", "preemption", before="checkpoints",
    may_change="imports Checkpoints.lock on_any_rank catch_signals train",
    same_losses=0.01, brings="saves a checkpoint when Ctrl-C or SIGTERM ends the run")
add("gradient_checkpointing", "beyond/long_run/6_gradient_checkpointing.py", "gradient checkpointing",
    before="preemption",
    may_change="imports add_flags MAY_CHANGE GPT.__init__ GPT.forward train",
    same_losses=0.1, brings="recomputes each block's activations in the backward pass instead of storing them")
add("chunked_cross_entropy", "beyond/long_run/7_chunked_cross_entropy.py", "chunked cross-entropy",
    before="gradient_checkpointing",
    may_change="add_flags MAY_CHANGE ChunkedCrossEntropy GPT.__init__ GPT.forward train",
    same_losses=0.1, chunked=True,
    brings="computes the loss in chunks of tokens, so only one chunk's logits exist at a time")
# Both trunks in one, and the shape of published models.
add("long_run", "beyond/long_run/long_run.py", "a modern model, a long run",
    before=("chunked_cross_entropy", "zero_init"),
    may_change="imports add_flags GPT.__init__ GPT.forward Checkpoints.refuse_other_run last_step_at_max_lr train",
    chunked=True,
    brings="trains the modern model on one GPU, or on several (untested), and survives interruptions")
add("grouped_query_attention", "beyond/long_run/grouped_query_attention.py", "grouped-query attention",
    before="long_run",
    may_change="add_flags GPTConfig model_config CausalSelfAttention GPT.__init__",
    has_mfu=False, brings="lets query heads share keys and values, as in Qwen3, which shrinks the KV cache")
# Several cards.
add("sharded_optimizer", "beyond/several_cards/sharded_optimizer.py", "sharded optimizer", before="long_run",
    may_change="GPT.configure_optimizers MuonAdamW.step ShardedMuonAdamW Checkpoints.save init_ranks train",
    same_losses=0.01, torchrun=True,
    brings="divides moments and updates among the cards, which saves memory")
add("fsdp", "beyond/several_cards/fsdp.py", "FSDP", before="long_run",
    may_change="imports GPT.__init__ GPT.forward orthogonalize evaluate Checkpoints.load Checkpoints.save shard gather "
               "compile_parts optimizer_step train",
    torchrun=True, brings="divides parameters, gradients and moments among the cards, which saves memory")
add("sharded_checkpoint", "beyond/several_cards/sharded_checkpoint.py", "sharded checkpoint", before="fsdp",
    may_change="imports Checkpoints",
    same_losses=0.01, torchrun=True, brings="lets each card save its own part of a checkpoint")
# The last milliseconds on one GPU: from rung 10.
add("bf16_residual", "beyond/gpu/1_bf16_residual.py", "bfloat16 residual stream", before="10",
    may_change="GPT.forward",
    same_losses=0.1, memory=(32, 4, 0),
    brings="keeps the residual stream in bfloat16, which should cut memory traffic (an estimate)")
add("cuda_graphs", "beyond/gpu/2_cuda_graphs.py", "CUDA graphs", before="bf16_residual",
    may_change="imports add_flags GPT.configure_optimizers optimizer_step has_graphs GraphedStep train",
    same_losses=0.01, brings="launches a step's kernels with one call, which leaves fewer gaps between them")
add("heads_of_128", "beyond/gpu/3_heads_of_128.py", "heads of 128", before="cuda_graphs",
    may_change="MODELS GPTConfig",
    brings="halves the number of heads and doubles their width, so softmax computes half as many exponentials")
add("no_biases", "beyond/gpu/4_no_biases.py", "no biases", before="heads_of_128",
    may_change="CausalSelfAttention.__init__ MLP.__init__ Block.__init__ GPT.__init__ GPT._init_weights "
               "GPT.configure_optimizers",
    exports_to=None,
    brings="removes all biases, which should save kernels and memory traffic (an estimate)")

BY_NAME = {rung.name: rung for rung in RUNGS}
PEER = "peer_transformers"  # the one that needs no file fetched
PEERS = {name: Rung("", "ladder/measure/peer.py", f"{whose} GPT-2, everything on", scheduled=True)  # by their logs
         for name, whose in ((PEER, "transformers'"), ("peer_nanogpt", "nanoGPT's"),
                             ("peer_build_nanogpt", "build-nanogpt's"))}
ORDER = [*BY_NAME, *PEERS]  # of a table
TRACKS = list(dict.fromkeys(rung.track for rung in RUNGS if rung.track))  # in the order of the list


def parse_rungs(text):
    """The rungs of "0-2,ddp,muon,gpu/", without duplicates; raises UserError for anything that is not a rung."""
    rungs = []
    for word in text.replace(" ", "").split(","):
        first, dash, last = word.partition("-")
        if word not in BY_LABEL and word.rstrip("/") in TRACKS:
            rungs += [rung for rung in RUNGS if rung.track == word.rstrip("/")]
        elif dash and {first, last} <= {rung.label for rung in LADDER} and int(first) <= int(last):
            rungs += LADDER[int(first) : int(last) + 1]
        elif rung_named(word):
            rungs.append(rung_named(word))
        else:
            tracks = ", ".join(f"{track}/" for track in TRACKS)
            hint = f"ranges go from 0 to 10, and {tracks} are whole folders"
            hint = "compare and try take scripts of your own" if word.endswith(".py") else hint
            raise UserError(f"--rungs {text}: {unknown(word)}; {hint}")
    return list(dict.fromkeys(rungs))


def rung_named(word):
    """The rung called "7", "07", "ddp" or "muon", or by its file's name of today or of before; None for others."""
    stem = os.path.basename(word).removesuffix(".py")  # "" of a folder
    return BY_LABEL.get(stem.lstrip("0") or stem[:1]) or BY_NAME.get(today(stem))


def find_rung(word):
    """The same; raises UserError for others."""
    rung = rung_named(word)
    if rung is None:
        raise UserError(f"{unknown(word)}; write 0 to 10, ddp, or a script of beyond/ by its name (python -m ladder "
                        "diff lists them)")
    return rung


def unknown(word):
    """Says that a word is no rung, and what was meant, as far as it can tell."""
    if word in OLD_LABELS:
        return f"{word} is called {OLD_LABELS[word]} today"
    known = [*BY_LABEL, *(f"{track}/" for track in TRACKS)]
    near = [label for label in known if len(word) > 3 and word in label]
    near += [label for label in difflib.get_close_matches(word, known, cutoff=0.5) if label not in near]
    return f"no rung {word}" + (f", perhaps {' or '.join(near[:3])}" if near else "")


# ---- the names of logs, also of earlier times ------------------------------------------------------------------------


def today(name):
    """The name that a script has today, from the one that a record gives, both without suffix."""
    return BY_LABEL[OLD_NAMES[name]].name if name in OLD_NAMES else name


def rung_of(name):
    """The rung of a log's name; one without a label for a peer, and for a script outside of the ladder."""
    return BY_NAME.get(name) or PEERS.get(name) or Rung("", f"{name}.py", name)
