"""What layers use during a forward pass: context, cache, and the operations of a backend."""
