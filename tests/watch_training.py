"""What a script trains on and steps with, whatever its source says: through torch's own hooks."""
import contextlib
from types import SimpleNamespace

import torch
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook


@contextlib.contextmanager
def watch():
    """What models and optimizers do meanwhile, through torch's own hooks.

    inputs     of each forward pass of a model in training, (B, T)
    forward    a set of (training?, gradients?, type under autocast, type of the loss, precision of matrix products)
    gradients  as each optimizer step finds them
    groups     of the optimizer at each step
    leftover   the largest entry of the gradients that each forward pass of a model in training finds
    """
    seen = SimpleNamespace(inputs=[], forward=set(), gradients=[], groups=[], leftover=[])

    def see_forward(model, inputs, output):
        if type(model).__name__ == "GPT":
            dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
            seen.forward.add((model.training, torch.is_grad_enabled(), dtype, output.dtype,
                              torch.get_float32_matmul_precision()))
            if model.training:
                seen.inputs.append(inputs[0].clone())
                found = [p.grad.abs().max().item() for p in model.parameters() if p.grad is not None]
                seen.leftover.append(max(found, default=0))

    def see_step(optimizer, args, kwargs):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        if not any(gradient is None for gradient in gradients):  # else it is AdamW's step within `muon`'s
            seen.gradients.append([gradient.clone() for gradient in gradients])
            seen.groups.append([group | {"lr": float(group["lr"])} for group in optimizer.param_groups])

    handles = [register_module_forward_hook(see_forward), register_optimizer_step_pre_hook(see_step)]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def norm_of(gradients):
    return torch.cat([gradient.flatten() for gradient in gradients]).norm().item()
