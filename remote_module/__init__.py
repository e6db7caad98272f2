"""An ``nn.Module`` that lives on another worker; the successor of ``torch.distributed.nn``."""

from remote_module.module import _REMOTE_MODULE_PICKLED_ATTRIBUTES, RemoteModule, _RemoteModule

__all__ = ["_REMOTE_MODULE_PICKLED_ATTRIBUTES", "RemoteModule", "_RemoteModule"]
