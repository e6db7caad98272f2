"""The successor of ``torch.distributed.rpc``."""
