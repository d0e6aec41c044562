"""What tensors a program holds and what its collectives move, in bytes, as the operations show them."""
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary


class Watch(TorchDispatchMode):
    """What is made under it: `peak`, the most bytes that tensors held at once, and `largest`, the most that one held.

    `moved`: (collective, bytes of its buffer).

    A collective's buffer is the whole one, of all ranks; those of up to 100 bytes, a loss or a norm, are left out.
    """

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.largest, self.moved = WeakIdKeyDictionary(), 0, 0, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # look at what it does with the local tensors
        result = function(*args, **(kwargs or {}))
        name = f"{function.namespace}.{function._opname}"
        buffer = {
            "c10d._allgather_base_": lambda: args[0], "c10d._reduce_scatter_base_": lambda: args[1],
            "c10d.allreduce_": lambda: args[0][0], "_c10d_functional.all_gather_into_tensor": lambda: result,
        }
        if name in buffer and buffer[name]().nbytes > 100:
            self.moved.append((name, buffer[name]().nbytes))
        kinds = torch.Tensor, torch.nn.Parameter
        made = [leaf.untyped_storage() for leaf in tree_leaves(result) if type(leaf) in kinds]
        if any(storage not in self.storages for storage in made):
            for storage in made:
                self.storages[storage] = None
                self.largest = max(self.largest, storage.nbytes())
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages))
        return result
