"""All communication between ranks, and the layouts of tensors as parts of whole parameters; see its README.md."""
