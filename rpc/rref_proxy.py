"""The name under which ``torch.distributed.rpc`` has it."""

from rpc.rrefs.rref_proxy import RRefProxy as RRefProxy
