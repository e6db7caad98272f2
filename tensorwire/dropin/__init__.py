"""Programs and libraries that import ``torch.distributed.rpc`` use TensorWire, unedited.

After :func:`install`, or in a program started with ``python -m tensorwire.dropin script.py``,
``torch.distributed.rpc``, ``torch.distributed.autograd``,
``torch.distributed.optim.DistributedOptimizer``, ``torch.distributed.nn.RemoteModule`` and the
public names of ``torch._C._distributed_rpc`` stand for those of ``rpc``, ``autograd_dist``,
``optim_dist`` and ``remote_module``: in this process and in those it starts.

``names`` says what stands for what, ``redirection`` puts it there and takes it away,
``environment`` reaches the processes that are started, ``startup`` is what they find.
"""

from tensorwire.dropin.environment import environment
from tensorwire.dropin.errors import DropinError
from tensorwire.dropin.installing import install, is_installed, uninstall

__all__ = ["DropinError", "environment", "install", "is_installed", "uninstall"]
