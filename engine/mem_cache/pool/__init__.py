"""The bytes: tensors that hold what the books only count."""
