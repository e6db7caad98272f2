"""Another name of ``rpc.rrefs.rref_proxy``: where ``torch.distributed.rpc`` has ``RRefProxy``."""

from rpc.rrefs.rref_proxy import RRefProxy as RRefProxy
