"""Values and headers as bytes: messages, control messages, the codec, tensors and errors."""
