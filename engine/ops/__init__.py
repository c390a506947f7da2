"""The arithmetic, in torch: what declared models call through `Context` and loaded weights."""
