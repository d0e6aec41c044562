"""The one list of the rungs: file, title, and the definitions that each may change from the rung before.

The tests enforce it, and everything that shows the ladder reads it. A definition is a function, a class, or a method
("GPT.forward"), by name; "imports" stands for the import statements. The module docstring may always change.
"""
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Stage:
    """One rung of the ladder."""

    file: str  # relative to the repository's root
    title: str
    may_change: frozenset = frozenset()

    @property
    def path(self):
        return ROOT / self.file

    @property
    def name(self):
        """The file's name without its ending: also the name of its log."""
        return self.path.stem

    @property
    def label(self):
        """What the rung is called where numbers are asked for: "0" to "10", "ddp", "11" and on."""
        if self.name == "baseline":
            return "0"
        return "ddp" if self.name == "ddp_run" else str(int(self.name.split("_")[1]))


STAGES = [
    Stage("baseline.py", "baseline"),
    Stage("speedup_01_weight_tying.py", "weight tying", frozenset({"GPT.__init__", "GPT.from_pretrained"})),
    Stage("speedup_02_tf32.py", "TF32", frozenset({"main"})),
    Stage("speedup_03_bf16_autocast.py", "bfloat16 autocast", frozenset({"autocast_dtype", "main"})),
    Stage(
        "speedup_04_residual_scaling.py",
        "residual scaling",
        frozenset({"CausalSelfAttention.__init__", "MLP.__init__", "GPT._init_weights"}),
    ),
    Stage("speedup_05_compile.py", "torch.compile", frozenset({"compile_problem", "parse_args", "main"})),
    Stage(
        "speedup_06_flash_attn.py",
        "flash attention",
        frozenset({"CausalSelfAttention.__init__", "CausalSelfAttention.forward"}),
    ),
    Stage(
        "speedup_07_vocab_pad.py",
        "vocabulary padding",
        frozenset({"GPTConfig", "GPT.forward", "GPT.from_pretrained"}),
    ),
    Stage("speedup_08_adamw_clip.py", "AdamW betas, gradient clipping", frozenset({"main"})),
    Stage("speedup_09_cosine_lr.py", "cosine learning rate", frozenset({"get_lr", "main"})),
    Stage("speedup_10_fused_adamw.py", "fused AdamW, selective decay", frozenset({"GPT.configure_optimizers", "main"})),
    Stage("ddp_run.py", "DistributedDataParallel", frozenset({"imports", "DataLoaderLite", "main"})),
    # Beyond speed: what a long training run needs.
    Stage(
        "beyond/speedup_11_grad_accum.py",
        "gradient accumulation",
        frozenset({"imports", "parse_args", "main"}),
    ),
    Stage(
        "beyond/speedup_12_device_data.py",
        "data on the device",
        frozenset({"DataLoaderLite", "free_memory", "main"}),
    ),
    Stage(
        "beyond/speedup_13_validation.py",
        "validation",
        frozenset({"DataLoaderLite", "evaluate", "parse_args", "main"}),
    ),
    Stage(
        "beyond/speedup_14_checkpoint_resume.py",
        "checkpoints",
        frozenset({"imports", "save_checkpoint", "newest_checkpoint", "parse_args", "main"}),
    ),
    Stage(
        "beyond/speedup_15_activation_checkpointing.py",
        "activation checkpointing",
        frozenset({"imports", "GPT.__init__", "GPT.forward", "parse_args", "main"}),
    ),
]

LABELS = {stage.label: number for number, stage in enumerate(STAGES)}  # {"0": 0, ..., "ddp": 11, "11": 12, ...}
