"""The TENSORPIPE transport: frames carried by torch's own agent."""
